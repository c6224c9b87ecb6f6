"""NVML of one GPU, as pynvml spells it."""

import types


class StubNvml(types.ModuleType):
    """NVML of one GPU, used by processes `pids`.

    refused: queries that are not supported; answers: values by query, or what to call for one.
    """

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0
    NVML_NVLINK_MAX_LINKS = 6

    def __init__(self, pids=(), refused=(), **answers):
        super().__init__("pynvml")
        processes = [types.SimpleNamespace(pid=pid) for pid in pids]
        self.refused = refused
        self.answers = {"nvmlDeviceGetComputeRunningProcesses": processes, **answers}

    def __repr__(self):  # in the names of tests, which must not change from run to run
        return "NVML"

    def __getattr__(self, name):
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def answer(*_):
            if name in self.refused:
                raise self.NVMLError
            known = self.answers.get(name, "Handle" in name or None)  # any handle will do
            return known() if callable(known) else known

        return answer
