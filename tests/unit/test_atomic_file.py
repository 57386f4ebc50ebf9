"""A file is put in its place at once, and where it cannot be, that is known beforehand."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_nnxcheck import atomic_file


def no_space(*_):
    raise OSError(28, "No space left on device")


def test_it_is_the_old_one_or_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "päks of a b.txt"
    atomic_file.write(path, "old ü")
    path.chmod(0o640)
    for owner, name in ((os, "fsync"), (type(path), "replace")):
        monkeypatch.setattr(owner, name, no_space)
        with pytest.raises(OSError, match="No space left") as caught:
            atomic_file.write(path, "new")
        monkeypatch.undo()
        assert atomic_file.reason(caught.value) == "No space left on device"
        assert path.read_text(encoding="utf-8") == "old ü"
        assert list(tmp_path.iterdir()) == [path]
    atomic_file.write(path, "new")
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]
    atomic_file.write(tmp_path / "another", "x")
    (tmp_path / "plain").touch()
    assert (tmp_path / "another").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_kill_while_it_is_written_loses_nothing(tmp_path):
    (tmp_path / "file").write_text("old")
    program = "import os, signal\nfrom pathlib import Path\nfrom pytest_nnxcheck import atomic_file\n"
    program += "os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\natomic_file.write(Path('file'), 'new')\n"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "file").read_text() == "old"


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "link.txt"
    link.symlink_to(tmp_path / "there" / "file")
    atomic_file.write(link, "new")
    assert link.is_symlink()
    assert (tmp_path / "there" / "file").read_text() == "new"


def test_where_no_file_can_be_put(tmp_path):
    (tmp_path / "file").touch()
    reasons = {
        tmp_path: "it is a folder",
        tmp_path / "file" / "x": "Not a directory",
        tmp_path / "no" / "x": "No such file or directory",
        tmp_path / ("x" * 300): "File name too long",
        tmp_path / "x": "",
        tmp_path / "file": "",
    }
    assert {path: atomic_file.unwritable(path) for path in reasons} == reasons
    assert atomic_file.unwritable(Path("/proc/x"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_folders_are_made_where_asked(tmp_path):
    assert atomic_file.unwritable(tmp_path / "a" / "b" / "x", make_folders=True) == ""
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_a_read_only_folder(tmp_path):
    tmp_path.chmod(0o555)
    assert atomic_file.unwritable(tmp_path / "x") == "Permission denied"
