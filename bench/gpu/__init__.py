"""What is measured on a machine with an NVIDIA GPU, in parts that resume.

`bench/gpu.sh OUT` runs them all. A part is a module with `FILES` (patterns of what it
writes under OUT) and `run(job) -> Report`; it writes as it goes, so that what ends it
early costs the row in progress.
"""
