"""The service: HTTP over the store. It knows no SQL, no worker and no runner."""
