"""Reports as HTML files, one per kind of study."""
