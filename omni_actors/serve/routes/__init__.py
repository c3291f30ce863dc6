"""The handlers of the HTTP routes, one module for each. ``app`` lists them."""
