"""Present results: tables, DeepBench's format, charts and HTML files."""
