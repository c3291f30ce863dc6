"""The whole system on simulated workers, in one thread and in virtual time: one seed gives one schedule."""
