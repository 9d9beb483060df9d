"""The process of its own in which `edgefl doctor` tries the runtime. Source: docs/reference/doctor.md."""

import subprocess
import sys


def test_a_runtime_that_kills_its_process_does_not_kill_the_doctor():
    """onnxruntime is loaded in the second process alone; what the doctor loads itself is needed by every command."""
    code = (
        "import sys, edgefl_client.doctor.checks, edgefl_client.scoring.personal"
        "; print(sorted({'onnxruntime', 'torch', 'onnx'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
