"""EndForward of one engine in the name of another."""

from __future__ import annotations

from doctor_rig import DP, Engine, rig

from tools.stand_ins.mock_engine import Rooms


async def test_reports_of_another_engine_that_name_this_one_are_found_and_not_counted() -> None:
    async with rig() as r:
        named, silent = r.prefill
        named.info |= {"nnodes": 2, "dist_init_addr": "10.0.0.1:5000"}
        silent.speaks = []  # so that listening goes on until both reported
        stranger = Engine("prefill", Rooms(), r.endpoint)
        stranger.says = {
            "boot_id": "f" * 32,
            "instance_id": named.url,
            "dist_init_addr": "10.0.0.9:5000",
        }
        await stranger.speak()
        try:
            findings = await r.examine()
        finally:
            await stranger.stop()
    (found,) = [finding for finding in findings if finding.id == "plugin.instance-id"]
    assert found.subject == named.url
    assert "10.0.0.9:5000" in found.seen
    assert named.url in found.change
    assert "10.0.0.9:5000" in found.change
    of_named = [
        finding.seen
        for finding in findings
        if (finding.id, finding.subject) == ("endforward.ok", named.url)
    ]
    assert f"of all {DP} ranks" in of_named[0]
