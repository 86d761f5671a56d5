"""What joins GPUs, as `nvidia-smi topo -m` prints it: written here after the legend that the tool prints below its matrix."""

from __future__ import annotations

import os

import pytest
from slime_core.devices.nvidia_smi import describe_links, finds_nvlink, has_nvlink, nvidia_smi, read_links

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""
#: The tool underlines the names of the columns.
SWITCHED = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tNV18\tNV18\tPIX\t0-47,96-143\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNV18\tNV18\tSYS\t0-47,96-143\t0\t\tN/A\n"
    "GPU2\tNV18\tNV18\t X \tNV18\tSYS\t48-95,144-191\t1\t\tN/A\n"
    "GPU3\tNV18\tNV18\tNV18\t X \tSYS\t48-95,144-191\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\tSYS\tSYS\t X \t\t\t\t\n"
) + LEGEND
BRIDGED = """\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV4\tSYS\tSYS\t0-31\t0
GPU1\tNV4\t X \tSYS\tSYS\t0-31\t0
GPU2\tSYS\tSYS\t X \tNV4\t32-63\t1
GPU3\tSYS\tSYS\tNV4\t X \t32-63\t1
"""
OVER_PCIE = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPHB\t0-15\nGPU1\tPHB\t X \t0-15\n" + LEGEND
ALONE = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-15\t0\t\tN/A\n" + LEGEND


def test_each_pair_of_gpus_is_read_once_and_cards_and_affinities_are_not():
    assert read_links(SWITCHED) == {
        (0, 1): "NV18", (0, 2): "NV18", (0, 3): "NV18", (1, 2): "NV18", (1, 3): "NV18", (2, 3): "NV18",
    }  # fmt: skip
    assert read_links(BRIDGED)[2, 3] == "NV4"
    assert read_links(OVER_PCIE) == {(0, 1): "PHB"}
    assert read_links(ALONE) == {}
    assert read_links("") == read_links("No devices were found") == read_links(LEGEND) == {}


def test_only_links_named_nv_and_a_number_are_nvlinks():
    assert has_nvlink(read_links(SWITCHED))
    assert has_nvlink(read_links(BRIDGED))
    assert not has_nvlink(read_links(OVER_PCIE))  # the legend names NV#, and NODE begins like it
    assert not has_nvlink({(0, 1): "NODE"})


def test_links_are_told_by_kind():
    assert describe_links(read_links(SWITCHED)) == "NV18 between all 4 GPUs"
    assert describe_links(read_links(BRIDGED)) == "NV4 between 0-1 and 2-3; SYS elsewhere"
    quads = {(a, b): "NV12" if a // 4 == b // 4 else "SYS" for a in range(8) for b in range(a + 1, 8)}
    assert describe_links(quads) == "NV12 between 0-1-2-3 and 4-5-6-7; SYS elsewhere"


@pytest.fixture
def program(tmp_path, monkeypatch):
    def write(script: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return write


def test_the_tool_is_asked_for_the_matrix(program, tmp_path):
    (tmp_path / "matrix").write_text(BRIDGED)
    program(f'[ "$*" = "topo -m" ] && cat {tmp_path}/matrix')
    assert finds_nvlink()
    (tmp_path / "matrix").write_text(OVER_PCIE)
    assert not finds_nvlink()


def test_a_tool_that_fails_says_why_and_finds_no_link(program):
    program("echo no; echo driver >&2; exit 3")
    with pytest.raises(OSError, match="no\ndriver"):
        nvidia_smi("topo", "-m")
    assert not finds_nvlink()


def test_where_there_is_no_tool_there_is_nothing_to_read(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia_smi("topo", "-m") == ""
    assert not finds_nvlink()
