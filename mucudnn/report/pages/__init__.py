"""Reports as HTML files: one a study, and what all of them are made of."""
