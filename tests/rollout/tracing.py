"""A CPU that records work as a trace of torch's operations: what graphs do on a GPU."""

from torch.fx.experimental.proxy_tensor import make_fx

from hone.platforms.base import Recording
from hone.platforms.cpu import CpuPlatform


class TracingCpu(CpuPlatform):
    """Its recordings repeat exactly the operations that ran, over the tensors that they read and wrote."""

    records_graphs = True

    def record(self, work, beside=None):
        trace = make_fx(work)()
        result = trace()
        return Recording(lambda: result.copy_(trace()), result)
