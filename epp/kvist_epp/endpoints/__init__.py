"""Endpoints: the record, the endpoints file, discovery, and scraping of engines."""
