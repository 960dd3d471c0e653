"""The reader of bash scripts gives a command the arguments that bash itself gives it."""

import subprocess

import pytest

pytest.importorskip("tree_sitter_bash", reason="comes with hone-rl[migrate]")

from hone.migration.shell.holes import hole, holes, shown
from hone.migration.shell.script import MAX_DEPTH, MAX_STATEMENTS, read_script

SCRIPTS = {
    "defaults": 'A=${A:-1}; B=${B-two}; C=${C:=3}; E=""; start "$A" $B "$C" "${E:-4}" "${E-5}" "${A:+6}" "${NONE+7}"',
    "arrays": 'A=(x "b c" k=$((1 + 2 * 3))); A+=(z); start "${A[@]}" "${A[1]}" ${#A[@]} "n=${#A[1]}"',
    "empty array": 'A=(); start first "${A[@]}" "" last',
    "words are split": 'L="a  b"; start $L "$L" pre$L "pre $L"',
    "arithmetic": "P=1024 R=8192; start $(((P + R) * 2)) $((R / 3)) $((-7 / 2)) $((7 % 4 ** 2)) $((P > R ? 1 : 2))",
    "arithmetic as a default": 'A=2; start "${X:-$((1024 * (A + 1)))}" ${Y:-$((A))} k=${Z:=$((A > 1 ? 8 : 9))}',
    "trims": 'F=/a/b/c.tar.gz; start "${F##*/}" "${F#*/}" "${F%.*}" "${F%%.*}" "${F//\\//_}" "${F/a/X}" "${F:3:4}"',
    "case of letters": 'N=True; start "${N,,}" "${N^^}" "${N,}"',
    "case": 'for D in npu gpu other; do case "$D" in npu|gpu) E=chip;; *) E=none;; esac; start "$D" $E; done',
    "if": 'V=1; if [ "${V:-0}" != 0 ] && [ "${D:-gpu}" = gpu ]; then start yes; elif [[ $V == 2* ]]; then start a; fi',
    "else": 'V=vllm; if [[ $V == sg* ]]; then start sglang; elif [ -z "$V" ]; then start empty; else start "$V"; fi',
    "numbers": "N=8; if (( N % 3 != 0 && N > 4 )); then start odd; fi; [ $N -ge 8 ] && start big || start small",
    "functions": 'run() { start "$1" "$#" "${2:-none}"; }; run a b; run c',
    "quotes": """start 'a $b' "c \\"d\\" \\$e" f\\ g $'h\\ti' "['x','y']" +k='["a","b"]'""",
    "continued lines": 'start a \\\n  b=1 \\\n  "c"',
    "text of a here-document": 'N=5; read -r -d "" T <<EOF\nmodule --lr $N \\\n  --name x\nEOF\nstart $T',
    "text of another shell": 'export A=1; bash -xc \'start $A "$0" "$1" $((2 * A))\' n "b c"',
    "expanded text of another shell": 'A=1; bash -c "start $A \\$1" n "3 4"',
    "arguments": 'start "$@" "$1" ${2}',
}


def of_bash(script, arguments):
    """Arguments of each call of `start`, from bash."""
    said = "start() { printf '%s\\0' \"$@\"; printf '\\1\\0'; }; export -f start\n"
    command = ["bash", "--norc", "-c", said + script, "bash", *arguments]
    output = subprocess.run(command, capture_output=True, check=False, timeout=30).stdout.decode()
    calls = output.split("\1\0")[:-1]
    return [call.split("\0")[:-1] for call in calls]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_command_gets_the_arguments_that_bash_gives_it(name):
    arguments = ["one", "two words"]
    found = read_script(SCRIPTS[name], {}, arguments)
    assert [words[1:] for words in found.commands if words[0] == "start"] == of_bash(SCRIPTS[name], arguments)
    assert found.notes == []


def test_what_only_running_tells_is_a_hole_with_the_text_of_the_script():
    found = read_script('F="$HOME/data"; start "$F/a" n=$(date +%s) "$((N + $(nproc)))"', {}, [])
    words = found.commands[0][1:]
    assert [holes(word) for word in words] == [["$HOME"], ["$(date +%s)"], ["$((N + $(nproc)))"]]
    assert [shown(word) for word in words] == ["$HOME/data/a", "n=$(date +%s)", "$((N + $(nproc)))"]
    known = read_script('start "$HOME/a"', {"HOME": "/data"}, [])
    assert known.commands == [["start", "/data/a"]]


def test_the_text_of_another_shell_is_read_behind_launchers_and_its_lines_are_counted():
    script = 'N=2\nsrun -N $N bash --norc -c "\n if ls; then A=1; fi\n start \\$A $HOME" | tee log'
    found = read_script(script, {}, [])
    assert [[shown(word) for word in words] for words in found.commands] == [
        ["ls"],
        ["start", "$A", "$HOME"],
        ["tee", "log"],
    ]
    assert found.choices[0].startswith("line 3: `if ls; then A=1; fi` depends on a condition")
    endless = read_script('X=\'bash -c "$X"\'; bash -c "$X"', {}, [])
    assert endless.commands == []
    assert endless.choices == [f"reading ended early: blocks are nested more than {MAX_DEPTH} deep"]


def test_a_branch_that_only_running_chooses_is_left_out_with_a_note():
    found = read_script('if python -c "import x"; then A=1; else A=2; fi\nstart "${A:-none}"', {}, [])
    assert ["start", "none"] in found.commands
    assert len(found.notes) == 1
    assert "line 1" in found.notes[0]
    found = read_script("case $(uname) in Linux) A=1;; esac; start ${A:-none}", {}, [])
    assert found.commands[-1] == ["start", "none"]
    assert "$(uname)" in found.notes[0]


@pytest.mark.parametrize(
    ("script", "name", "way"),
    [
        ('D=${D:-$(uname)}; case "$D" in npu) KL=(x);; esac; start "${KL[@]}"', "KL", "--set D=VALUE"),
        ('case "${DEVICE:-$(uname)}" in npu) KL=(x);; esac; start "${KL[@]}"', "KL", "--set DEVICE=VALUE"),
        ("if ls; then LR=1; elif who; then WD=2; fi; start $WD $LR", "LR, WD", "compare"),
        ("[ -f x ] && LR=1; start $LR", "LR", "compare"),
        ("ls || LR=1; start $LR", "LR", "compare"),
        ("while read -r X; do LR=1; done; start $LR", "LR", "compare"),
        ("for N in $(seq 1 3); do LR=$N; done; start $LR", "LR", "compare"),
        ("A=(a b); A[1]=c; start ${A[@]}", "A", "compare"),
    ],
)
def test_a_part_that_is_not_read_and_sets_a_variable_in_use_is_a_choice(script, name, way):
    (choice,) = read_script(script, {}, []).choices
    assert f"and {name} may have another value: " in choice
    assert way in choice
    assert read_script(script.partition("; start")[0], {}, []).choices == []  # nothing uses the variable


def test_nothing_is_run(tmp_path):
    mark = tmp_path / "mark"
    read_script(f"touch {mark}; A=$(touch {mark}); cat > {mark} <<EOF\nx\nEOF\n`touch {mark}`", {}, [])
    assert not mark.exists()


def test_scripts_without_bound_end_with_a_note():
    assert (
        "characters"
        in read_script("A=" + "x" * 1000 + "; for i in " + "1 " * 40 + '; do A="$A$A"; done', {}, []).notes[-1]
    )
    loop = "f() { f; f; }; f"
    assert read_script(loop, {}, []).notes[-1].startswith("reading ended early")
    many = "A=1\n" * (MAX_STATEMENTS + 1)
    assert "statements" in read_script(many, {}, []).notes[-1]


def test_marks_of_holes_in_a_script_are_removed():
    assert read_script(f"start {hole('$X')}", {}, []).commands == [["start", "$X"]] or holes(
        read_script(f"start {hole('$X')}", {}, []).commands[0][1]
    ) == ["$X"]
