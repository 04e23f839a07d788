"""A convolution, and the same one divided into micro-batches within 1 MiB."""

import numpy as np

import mucudnn

rng = np.random.default_rng(0)
x = rng.standard_normal((32, 16, 28, 28), dtype=np.float32)
w = rng.standard_normal((32, 16, 3, 3), dtype=np.float32)

plain = mucudnn.conv2d(x, w, padding=1)

tuner = mucudnn.Tuner(workspace_limit="1MiB", verify=1)  # compare every run
divided = mucudnn.conv2d(x, w, padding=1, tuner=tuner)

error = np.abs(plain - divided).max() / np.abs(plain).max()
print(f"largest difference: {error:.1e} of the largest value")
if error > 1e-4:
    raise SystemExit("the results differ")

dy = rng.standard_normal(plain.shape, dtype=np.float32)
dx = mucudnn.conv_backward_data(dy, w, x.shape, padding=1, tuner=tuner)
dw = mucudnn.conv_backward_filter(x, dy, w.shape, padding=1, tuner=tuner)
print(f"<y, dy> = {np.vdot(plain, dy):.1f}")
print(f"<x, dx> = {np.vdot(x, dx):.1f}")
print(f"<w, dw> = {np.vdot(w, dw):.1f}")
