"""The benchmarks behind every published figure. They report ratios between things that were measured in one run."""
