"""What README, tutorial and how-to pages show is done as it stands there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.pages import ELSEWHERE, ROOT, Block, Play, blocks

PAGES = (
    "README.md",
    "docs/tutorial.md",
    "docs/howto/write-an-agent.md",
    "docs/howto/operate.md",
    "docs/howto/production.md",
    "docs/howto/delivery.md",
    "docs/howto/drain-and-restart.md",
    "docs/howto/fail-over.md",
    "docs/howto/roll-out-a-version.md",
    "docs/howto/configure-agents.md",
    "docs/howto/callbacks.md",
    "docs/howto/sessions.md",
    "docs/howto/dead-letters.md",
    "docs/howto/dependencies.md",
    "docs/howto/secure-etcd.md",
    "docs/howto/tls.md",
    "docs/howto/audit.md",
    "docs/howto/api-keys.md",
    "docs/howto/secure.md",
    "docs/howto/limits.md",
    "CONTRIBUTING.md",
)
NOT_RUN = {
    "README.md": 3,
    "docs/tutorial.md": 1,
    "docs/howto/write-an-agent.md": 0,
    "docs/howto/operate.md": 1,
    "docs/howto/production.md": 2,
    "docs/howto/delivery.md": 0,
    "docs/howto/drain-and-restart.md": 0,
    "docs/howto/fail-over.md": 0,
    "docs/howto/roll-out-a-version.md": 0,
    "docs/howto/configure-agents.md": 0,
    "docs/howto/callbacks.md": 0,
    "docs/howto/sessions.md": 0,
    "docs/howto/dead-letters.md": 0,
    "docs/howto/dependencies.md": 4,
    "docs/howto/secure-etcd.md": 0,
    "docs/howto/tls.md": 0,
    "docs/howto/audit.md": 0,
    "docs/howto/api-keys.md": 0,
    "docs/howto/secure.md": 0,
    "docs/howto/limits.md": 0,
    "CONTRIBUTING.md": 1,
}
"""Blocks marked `elsewhere`. One more needs a reason here, so that pages do not slip out of being tested."""
PICTURES = frozenset({"text", "mermaid"})


def page_blocks(page: str) -> list[Block]:
    return blocks((ROOT / page).read_text())


@pytest.mark.timeout(400)  # the tutorial starts some thirty processes, one after another
@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_the_page_does_what_it_says(page: str, tmp_path: Path) -> None:
    play = Play(tmp_path)
    try:
        for block in page_blocks(page):
            play.run(block)
    finally:
        play.close()


@pytest.mark.parametrize("page", PAGES)
def test_blocks_that_are_not_run_are_counted(page: str) -> None:
    marked = [block for block in page_blocks(page) if block.word("elsewhere")]
    assert len(marked) == NOT_RUN[page]
    assert {block.word("elsewhere") for block in marked} - set(ELSEWHERE) == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run_or_a_picture_or_marked(page: str) -> None:
    unclear = [b for b in page_blocks(page) if not b.runs and not b.word("elsewhere") and b.language not in PICTURES]
    assert [f"{page}:{block.line}" for block in unclear] == []


def test_every_other_page_with_commands_is_among_these() -> None:
    shown = {str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]}
    shown |= {str(path.relative_to(ROOT)) for path in (ROOT / "docs/howto").glob("*.md")}
    with_code = {page for page in shown if any(block.language not in PICTURES for block in page_blocks(page))}
    assert with_code - set(PAGES) == set()


def test_the_readme_shows_the_agent_and_the_call_of_the_contract() -> None:
    readme = (ROOT / "README.md").read_text()
    call = """{"target":{"capabilities":["echo"]},"timeoutMs":2000,"payload":{"json":{"hello":"world"}}}"""
    call = f"grpcurl -plaintext -d '{call}' \\\n        127.0.0.1:7070 agentreach.v1.MeshService/Invoke"
    assert call in readme
    agent = next(block for block in blocks(readme) if block.word("file") == "extractor.py")
    caller = next(block for block in blocks(readme) if block.word("file") == "caller.py")
    assert len([line for line in agent.text.splitlines() if line.strip()]) <= 10
    assert len([line for line in caller.text.splitlines() if line.strip()]) <= 6


# ---- the play can fail ----


@pytest.mark.parametrize(
    "page",
    [
        "```sh\nfalse\n```\n",
        "```sh\necho one\n```\n```text output\ntwo\n```\n",
        "```sh background\nfalse\n```\n",
    ],
)
def test_a_page_that_is_wrong_is_found(page: str, tmp_path: Path) -> None:
    play = Play(tmp_path)
    try:
        with pytest.raises(AssertionError):
            for block in blocks(page):
                play.run(block)
    finally:
        play.close()


def test_an_ellipsis_stands_for_anything_in_its_line(tmp_path: Path) -> None:
    play = Play(tmp_path)
    for block in blocks("```sh\necho one two three\n```\n```text output\none … three\n```\n"):
        play.run(block)
