"""Files that requests contain or name, and the conversion of audio."""
