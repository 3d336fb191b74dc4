"""Stand-in for triton.language on CPU engines: see `sglang_sbs/testing/absent_package.py`."""

from sglang_sbs.testing import absent_package

absent_package.install(__name__, constexpr=absent_package.same)
