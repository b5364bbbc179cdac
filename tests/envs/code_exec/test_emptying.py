"""What a program leaves in its folder is removed, and nothing outside of it is touched."""

from __future__ import annotations

from pathlib import Path

from ludic.envs.code_exec.sandbox.inside.supervisor import empty


def test_locked_folders_go_and_what_a_link_points_to_keeps_its_rights(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    inner = folder / "locked" / "locked in it"
    for made in (inner, outside / "below"):
        made.mkdir(parents=True)
    (inner / "file").write_text("x")
    (folder / "file").write_text("x")
    for place in (folder, inner.parent):
        (place / "link").symlink_to(outside)
    outside.chmod(0o755)
    inner.chmod(0)
    inner.parent.chmod(0)
    empty(str(folder))
    assert list(folder.iterdir()) == []
    assert outside.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in outside.iterdir()] == ["below"]
