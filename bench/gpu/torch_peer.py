"""PyTorch's convolution as a rival: `cudnn.benchmark`, two limits, two formats.

PyTorch remembers the plan of a convolution per thread, whatever `benchmark_limit` was
when it searched. So each limit has a thread of its own, in which the search and all
timed runs happen.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.gpu.turns import sampler
from mucudnn.backends import Backend
from mucudnn.errors import BackendUnavailableError
from mucudnn.ir.conv import ConvProblem, Direction

__all__ = ["Torch"]

_LIMITS = (10, 0)
_FORMATS = {"NCHW": "contiguous_format", "NHWC": "channels_last"}
_DEVICES = {"cuda": "cuda", "cpu": "cpu"}


class Torch:
    """PyTorch on the same device.

    Args:
        backend_name: What the others are measured on.

    Raises:
        BackendUnavailableError: PyTorch is missing or cannot use that device.
    """

    def __init__(self, backend_name: str) -> None:
        kind = backend_name.partition(":")[0]
        if kind not in _DEVICES:
            raise BackendUnavailableError(f"PyTorch has no device like {backend_name}")
        try:
            import torch
        except ImportError as e:
            raise BackendUnavailableError(f"PyTorch is not installed: {e}") from e
        if kind == "cuda" and not torch.cuda.is_available():
            raise BackendUnavailableError(
                f"PyTorch {torch.__version__} sees no CUDA device"
            )
        self._torch = torch
        self._device = _DEVICES[kind]
        self._threads = {limit: ThreadPoolExecutor(1) for limit in _LIMITS}
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = True

    @property
    def version(self) -> str:
        """PyTorch's, and that of the cuDNN it uses."""
        cudnn = self._torch.backends.cudnn.version()
        return f"{self._torch.__version__}, cuDNN {cudnn}"

    def rivals(
        self, backend: Backend, problem: ConvProblem
    ) -> Iterator[tuple[str, Callable[[], float], int | None]]:
        """Name, sampler and bytes of workspace; plans are found before each is given.

        Raises:
            RuntimeError: PyTorch cannot run it.
        """
        for layout in _FORMATS:
            op = self._operation(problem, layout)
            for limit, thread in self._threads.items():
                self._torch.backends.cudnn.benchmark_limit = limit
                nbytes = thread.submit(self._searched, op).result()
                sample = sampler(backend, op)
                yield (
                    f"torch_limit{limit}_{layout}",
                    lambda thread=thread, sample=sample: thread.submit(sample).result(),  # type: ignore[misc]
                    nbytes,
                )

    def release(self) -> None:
        """Give cached memory back."""
        if self._device == "cuda":
            self._torch.cuda.empty_cache()

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads.values():
            thread.shutdown()

    def _searched(self, op: Callable[[], Any]) -> int | None:
        """Run twice; the second has its plan, and only its own workspace."""
        op()
        if self._device != "cuda":
            return None
        cuda = self._torch.cuda
        cuda.synchronize()
        cuda.reset_peak_memory_stats()
        before: int = cuda.memory_allocated()
        out = op()
        cuda.synchronize()
        outputs = out if isinstance(out, tuple) else (out,)
        made = sum(t.numel() * t.element_size() for t in outputs if t is not None)
        peak: int = cuda.max_memory_allocated()
        return max(0, peak - before - int(made))

    def _operation(self, problem: ConvProblem, layout: str) -> Callable[[], Any]:
        torch = self._torch
        where = {
            "device": self._device,
            "dtype": getattr(torch, problem.dtype),
        }
        memory_format = getattr(torch, _FORMATS[layout])
        x, w, dy = (
            (torch.rand(shape, **where) - 0.5).to(memory_format=memory_format)
            for shape in (problem.x_shape, problem.w_shape, problem.y_shape)
        )
        stride, padding = list(problem.stride), list(problem.padding)
        dilation = list(problem.dilation)
        if problem.direction is Direction.FORWARD:

            def forward() -> Any:
                with torch.no_grad():
                    return torch.conv2d(
                        x, w, None, stride, padding, dilation, problem.groups
                    )

            return forward
        wanted = [
            problem.direction is Direction.BACKWARD_DATA,
            problem.direction is Direction.BACKWARD_FILTER,
            False,
        ]

        def backward() -> Any:
            return torch.ops.aten.convolution_backward(
                *(dy, x, w, None, stride, padding, dilation),
                *(False, [0, 0], problem.groups, wanted),
            )

        return backward
