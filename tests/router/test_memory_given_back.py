"""Memory of large bodies goes back to the system."""

from __future__ import annotations

import subprocess
import sys


def test_large_blocks_go_back_to_the_system_however_they_were_freed() -> None:
    # In a process of its own: it is for all of a process, and depends on what came before.
    program = """if True:
        import sys
        from sglang_sbs.router.memory import give_back_large_blocks
        if sys.argv[1:]:
            give_back_large_blocks()
        first = bytearray(2 << 20)
        del first  # from here on large blocks come from the heap
        large, small = [], []
        for number in range(40):
            large.append(b"x" * ((1 << 20) + number))
            small.append(b"x" * (4000 + number))
        del large
        print(4096 * int(open("/proc/self/statm").read().split()[1]))
    """
    sizes = [
        int(subprocess.check_output([sys.executable, "-c", program, *more], text=True))
        for more in ([], ["now"])
    ]
    assert sizes[0] - sizes[1] > 30 << 20
