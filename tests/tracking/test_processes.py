import os
import signal
import subprocess
import sys

from roll.tracking.status import look_at


def test_a_process_is_there_stopped_or_gone():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    running = look_at(child.pid)
    assert running.started is not None and running == look_at(child.pid) and not running.stopped
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert look_at(child.pid).stopped
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert look_at(child.pid) is None, "a zombie is nobody"
    child.communicate()
    assert look_at(child.pid) is None
