"""What the engines that make pictures share: request parameters, and the data of their outputs."""
