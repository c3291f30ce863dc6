"""Building blocks of engines that decode one position per forward: cache, scheduler, sampling, detokenization."""
