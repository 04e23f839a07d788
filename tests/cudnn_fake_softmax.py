"""The fake library's softmax, in float64, beside its other maps."""

import numpy as np

from mucudnn.backends.cuda.libcudnn import SoftmaxAlgorithm, SoftmaxMode
from tests.cudnn_fake_maps import Maps, blend

__all__ = ["AllMaps"]

_SUMMED = {SoftmaxMode.INSTANCE: (1, 2, 3), SoftmaxMode.CHANNEL: (1,)}


class AllMaps(Maps):
    """Probabilities or their logarithms; the fast way overflows, as documented."""

    def softmax_forward(
        self, handle, algorithm, mode, alpha, x, x_data, beta, y, y_data
    ):
        self._same(x, y)
        x, axes = self._library.object(x).values, _SUMMED[SoftmaxMode(mode)]
        algorithm = SoftmaxAlgorithm(algorithm)

        def work():
            logits = x.at(x_data).astype("f8")
            if algorithm is not SoftmaxAlgorithm.FAST:
                logits = logits - logits.max(axes, keepdims=True)
            total = np.exp(logits).sum(axes, keepdims=True)
            made = np.exp(logits) / total
            if algorithm is SoftmaxAlgorithm.LOG:
                made = logits - np.log(total)
            blend(self._library.object(y).values, y_data, made, alpha, beta)

        self._run("cudnnSoftmaxForward", handle, work)
