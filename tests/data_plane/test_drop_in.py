"""The picker in the place of llm-d's router, with the arguments that its chart writes."""

from pathlib import Path

from tests.data_plane.product import CHAT, product

CONFIG = Path(__file__).parents[1] / "epp" / "compat" / "llmd" / "config.yaml"
ARGUMENTS = ("--zap-encoder", "json", "--config-file", str(CONFIG), "--ha-enable-leader-election", "--v=4")
TEXT = "A story about a fox that lived at the edge of a wood. " * 40


async def test_a_picker_with_llm_d_s_arguments_serves(tmp_path: Path) -> None:
    """A picker with llm-d's arguments picks behind a real Envoy, matches cached prefixes by events, and logs
    which of the arguments it does not support."""
    body = {"model": "m", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}
    async with product(tmp_path, engines=3, picker_flags=ARGUMENTS) as running:
        status, _, _ = await running.send(body, CHAT)
        await running.until("kvist_epp_index_blocks", 1)
        _, again, _ = await running.send(body, CHAT)
        said = running.picker.child.tail(200_000)
        found = await running.explain(body)

    assert status == 200
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    assert max(row["matched_tokens"] for row in found["endpoints"]) > 100
    assert len(found["picked"]) == 2
    assert "kvist-epp: --ha-enable-leader-election: all replicas serve" in said
    assert "kvist-epp: --config-file: plugin disagg-profile-handler: " in said
