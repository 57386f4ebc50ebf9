"""A value is found out once; a file that is damaged, or no file, costs finding it out again."""

import os

import pytest

from pytest_nnxcheck.kept import Folder, Kept


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "folder", ".txt", bytes, bytes)


def recalled(folder, value):
    """What a new process has, if it finds this value out."""
    return Kept().recall("key", lambda: value, folder)


def test_what_is_kept_comes_back_as_it_was_or_is_found_out_anew(folder):
    assert recalled(folder, b"a\nb") == b"a\nb"
    assert recalled(folder, b"never") == b"a\nb"
    file = folder.path / "key.txt"
    whole = file.read_bytes()
    for damaged in (b"", whole[:-1], whole + b"c", b"0" + whole[1:], whole.replace(b"a", b"c")):
        file.write_bytes(damaged)
        assert recalled(folder, b"new") == b"new"
        assert recalled(folder, b"never") == b"new"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes here")
@pytest.mark.parametrize("kind", ["a folder", "a pipe", "a link to a folder"])
def test_what_is_kept_takes_the_place_of_what_is_no_file(folder, kind, tmp_path):
    file = folder.path / "key.txt"
    folder.path.mkdir()
    if kind == "a pipe":
        os.mkfifo(file)
    else:
        there = file if kind == "a folder" else tmp_path / "there"
        (there / "inside").mkdir(parents=True)
        if kind != "a folder":
            file.symlink_to(there)
    assert recalled(folder, b"new") == b"new"
    assert recalled(folder, b"never") == b"new"
    assert (tmp_path / "there" / "inside").is_dir() is (kind == "a link to a folder")


def test_a_folder_that_takes_no_file_keeps_the_value_in_memory(tmp_path):
    (tmp_path / "file").touch()
    kept = Kept()
    assert kept.recall("key", lambda: b"found", Folder(tmp_path / "file", "", bytes, bytes)) == b"found"
    assert kept.recall("key", lambda: b"never") == b"found"
