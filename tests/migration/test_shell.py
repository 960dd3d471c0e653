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
    "local variables": "A=1; f() { local A=2 B=3; C=4; start $A $B; }; f; start $A ${B:-none} $C",
    "a process of its own": "A=1; (A=2; start $A; exit); start $A; { A=3; start $A; } | cat; start $A",
    "shifted arguments": 'f() { local N=$1; shift; start "$N" "$@"; shift 2; start "$@"; }; f a "b c" d e; start "$1"',
    "set arguments": 'set -- k=1 "l=2 3"; start "$@" $#; for X; do start "$X"; done; shift; start "$@"',
    "unset": "A=1; unset A; start ${A:-none}",
    "what is not reached": "f() { A=1; return 0; A=2; }; f; start $A; exit 0; start never",
    "returned": 'f() { return 1; }; g() { [ "$1" = x ]; }; if f; then start f; fi; if g x; then start g; fi',
    "break and continue": "for I in 1 2 3 4; do [ $I = 2 ] && continue; if [ $I = 4 ]; then break; fi; start $I; done",
    "while": 'while [[ $# -gt 0 ]]; do case "$1" in one) start 1;; *) start "$1";; esac; shift; done; start $#',
    "until": "I=0; until [ $I -ge 3 ]; do I=$((I + 1)); done; start $I; for I in {2..4} {1..0}; do start $I; done",
    "counted": "I=1; ((I++)); ((I += 4)); J=$((I++ * 2)); start $I $J $((I = 3)) $((--I)); (( I > 9 && I++ )); "
    "start $I",
    "precedence": "A=4; start $((-2 + 5)) $((-A + 5)) $((!A + 1)) $((2 ** 3 ** 2)) $((-A ** 2)) $((10 - 3 - 2)) "
    "$((A&1==0)) $((A - 1 << 2)) $((1 + (A > 2 ? 3 : 4))) $((A > 2 ? A > 3 ? 1 : 2 : 3)) $((B = C = 3, B + C)) "
    "$((0 && B++)) $B $((A*-2))",
    "expanded in arithmetic": "A=1+2; N=; start $((2 * $A)) $((${X:-3} + 1)) $((${N:-0}))",
    "bits": "start $((1 << 4)) $((6 & 3)) $((5 | 2)) $((6 ^ 3)) $((~1)) $((010)) $((0x10)) $((-7 % 3)) $((-9 >> 1))",
    "joined": 'A=(x "y z"); start "${A[*]}" ${A[*]} "$*"; IFS=,; start "${A[*]}"',
    "parts of an array": 'A=(a b c d); start "${A[@]:1:2}" "${A[@]:2}" "${A[@]: -1}" "${@:2}" "${@: -1}" ${#A}',
    "parts of each text": 'A=(ab b); start "${A[@]/#/x=}" "${A[@]%b}" "${A[@]/%b/c}"',
    "text for eval": "C='start a \"b c\"'; N=2; eval \"$C\" n=$N; eval 'N=3'; start $N",
    "two lines": "A=1 B=2\nstart $A $B; A=5 start x; start $A",
    "falling case": "case a in a) A=1;& b) B=2;; c) C=3;; esac; case a in a) D=1;;& [a-c]) E=2;; *) F=3;; esac; "
    'start $A $B "${C:-}" $D $E "${F:-}"',
    "quoted patterns": 'S="*"; case abc in "$S") start any;; abc) start abc;; esac; [[ abc == "a*" ]] || '
    "start literal; "
    "[[ abc == a* ]] && start glob; [ 'a*' = a* ] && start same; [[ abc != 'a*' ]] && start other",
    "quoted defaults": """start ${NONE:-"a b"} ${NONE:-'c d'} "${NONE:-'e'}" ${NONE:-f g}""",
    "an unset argument": "start ${9-none} ${9:-none} ${1-none}",
    "a folder of the user": 'HOME=/h; start ~ ~/a k=~/b "~/c" a~/d',
    "lists in braces": "HOME=/h B='x y' C=z C1=v C2=; start x{1,2}y k={a:1,b:2} {a,b}{c,d} a{,b} {a,b{1,2}c} {{a,b},c} "
    "{,} {a,} {$B,c} "
    '"$C"{1,2} $C{1,2} ${C}{1,2} {\'a,b\',c} {"$B",c} {a\\,b,c} k={"x":1,\'y z\':2} ~/{a,b} $((1 + 1)){a,b} '
    "{a{b,c} a{b,c}} {}{a,b} {a}{b,c}; A=(x{1,2} y); start ${A[@]} ${#A[@]}; for I in a{1,2}; do start $I; done",
    "numbers in braces": "N=3; start x{1..3} {3..1} {-2..1} {01..3} {-01..1} {1..10..3} {3..1..1} {1..3..-2} {1..3..0} "
    "{a..e..2} {c..a} {X..Z} {1..2}{a,b} {{1..2},x}",
    "braces that stay": "N=2; A={a,b}; start $A {a} {} {a..} {1..a} {1..$N} \\{a,b\\} '{a,b}' \"{a,b}\" {a,b a,b} "
    "{a..bc} {1..2..} ${NONE:-{a}}; [[ {a,b} == '{a,b}' ]] && start same; case {a,b} in '{a,b}') start case;; esac",
    "the end of a here-document": 'read -r -d "" T <<"EOF"\n  $N x\nEOF\nstart "$T"',
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


@pytest.mark.parametrize(
    "script",
    [
        "A=1; let A=2; start $A",
        "A=1; read A; start $A",
        "A=1; printf -v A %d 2; start $A",
        "A=1; mapfile A; start $A",
        "A=1; (( A = B[0] )); start $A",
        "A=(1 2); A[1]=3; start $A",
        "A=([1]=x); start $A",
        "declare -i A=1+2; start $A",
        "A=a1; start ${A//[0-9]/}",
        "A=1; while nvidia-smi; do A=2; done; start $A",
        "A=1; for ((I = 0; I < 3; I++)); do A=2; done; start $A",
        "I=5; for ((I = 0; I < 3; I++)); do :; done; start $I",
        "A=1; if nvidia-smi; then A=2; fi; start $A",
        "A=1; if [ -f x ]; then start 0; elif nvidia-smi; then A=2; fi; start $A",
        "A=1; if nvidia-smi; then :; else ((A++)); fi; start $A",
        "A=1; if nvidia-smi; then ((A += 2)); fi; start $A",
        "A=1; if nvidia-smi; then unset A; fi; start $A",
        "A=1; case $(uname) in Linux) A=2;; esac; start $A",
        "A=1; for I in $(ls); do A=$I; done; start $A",
        "A=(x y); if nvidia-smi; then A=(z); fi; start $A",
        "A=x; if nvidia-smi; then A+=y; fi; start $A",
    ],
)
def test_a_variable_that_is_set_in_a_way_that_is_not_read_is_a_hole(script):
    assert holes(read_script(script, {}, []).commands[-1][1])


def test_a_given_value_stands_for_one_that_only_running_tells():
    for script in (
        "A=1; if nvidia-smi; then A=2; fi; start $A",
        "while nvidia-smi; do A=2; done; bash -c 'read A; start $A'",
    ):
        assert read_script(script, {"A": "7"}, []).commands[-1] == ["start", "7"]


def test_what_may_end_a_script_does_not_end_its_reading():
    found = read_script("nvidia-smi && exit 0\nif [ $# -lt 1 ]; then exit 1; fi\nstart 1", {}, [])
    assert found.commands[-1] == ["start", "1"]
    assert [note.partition(" ends")[0] for note in found.notes] == [
        "line 1: `nvidia-smi && exit 0` may end here (exit); it is read as if it went on",
        "line 2: `exit 1`",
    ]


def test_another_script_that_is_read_in_is_noted():
    assert read_script("source env.sh\nstart 1", {}, []).notes == [
        "line 1: `source env.sh` is another script, which is not read"
    ]


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
    found = read_script('A=0; if python -c "import x"; then A=1; else A=2; fi\nstart "${A:-none}"', {}, [])
    assert ["start", hole("$A")] in found.commands
    assert len(found.notes) == 1
    assert "line 1" in found.notes[0]
    found = read_script("case $(uname) in Linux) A=1;; esac; start ${A:-none}", {}, [])
    assert found.commands[-1] == ["start", hole("$A")]
    assert "$(uname)" in found.notes[0]


@pytest.mark.parametrize("more", ["A+=(z)", 'A=("${A[@]}" z)', "A=(${A[@]} z)", 'B="$A z"; A+=(z)'])
def test_a_part_that_is_left_out_and_adds_words_to_a_list_keeps_the_others(more):
    for start, text in (("A=(x y)", more), ('A="x y"', 'A+=" z"'), ('A="x y"', 'A="$A z"'), ("A='x y'", "A=${A}' z'")):
        found = read_script(f"{start}; if nvidia-smi; then {text}; fi; start ${{A[@]}}", {}, [])
        assert found.commands[-1] == ["start", "x", "y", hole("the rest of $A")]
        assert "A may have another value" in found.choices[0]


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
