"""Every figure that the project publishes comes from here: ratios between things measured in one run."""
