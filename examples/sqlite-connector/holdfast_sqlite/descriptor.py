"""The descriptor of the connector `sqlite`."""

from holdfast.descriptors import ConnectorDescriptor

SQLITE = ConnectorDescriptor(name="sqlite", version="1", build="holdfast_sqlite.connector:SqliteConnector", sql=True)
