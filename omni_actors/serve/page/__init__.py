"""The page at ``/``: talk to the pipeline in a browser, and watch its stages, rings and requests.

``files`` has the static files, ``chaos`` the faults that the page can inject on a test machine. What the page shows
comes from the live state (``/v1/state``). Its questions go to the same routes that every client uses.
"""

from __future__ import annotations
