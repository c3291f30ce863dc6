"""The engine that runs any pipeline of diffusers from a prompt to a picture or a video: one stage for the whole."""
