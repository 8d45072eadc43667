# Sourced by quickstart and test: one virtual environment in .venv, made once and reused.
# Set PYTHON to choose the interpreter. Nothing outside this folder is touched.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"

# In bold on a terminal, plain in a log.
say() {
  if [ -t 2 ]; then printf '\033[1m==> %s\033[0m\n' "$*" >&2; else printf '==> %s\n' "$*" >&2; fi
}
die() { printf 'error: %s\n' "$*" >&2; exit 2; }

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }
has_pip() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

# The first interpreter that will do; the reason when there is none.
find_python() {
  local candidate found="" old=""
  for candidate in ${PYTHON:-python3 python python3.12 python3.11 python3.10 python3.13}; do
    command -v "$candidate" >/dev/null 2>&1 || continue
    if ! is_new_enough "$candidate"; then
      old="$("$candidate" --version 2>&1 | head -n 1)"
      continue
    fi
    found="$candidate"
    if has_pip "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  [ -z "$found" ] || die "$found has no pip or venv. Install them (Debian, Ubuntu: apt install \
python3-venv python3-pip), then run this again."
  [ -z "$old" ] || die "Shoal needs Python 3.10 or newer; found only $old. Install a newer one, or \
name it: PYTHON=/path/to/python3.12 $0"
  die "no Python found. Install Python 3.10 or newer, or name it: PYTHON=/path/to/python3.12 $0"
}

# Whether .venv is there, whole, and was made at this very place.
is_usable() {
  is_new_enough "$VENV/bin/python" && grep -qsF "$VENV" "$VENV/bin/pip" &&
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1
}

# prepare EXTRAS: .venv holds shoal[EXTRAS] at the pinned versions. What was asked for is written
# down last, so an installation that was cut short is done again.
prepare() {
  local extras="$1" stamp python
  stamp="$VENV/.shoal-$extras-$(cat "$ROOT/constraints.txt" "$ROOT/pyproject.toml" | cksum | tr ' ' -)"
  if { [ -e "$stamp" ] || [ -e "${stamp/-data-/-dev-}" ]; } && is_usable; then
    return
  fi
  python="$(find_python)" || exit $?
  if ! is_usable; then
    say "making .venv with $("$python" --version 2>&1)"
    "$python" -m venv --clear "$VENV"
  fi
  say "installing shoal[$extras] and the pinned versions of constraints.txt (a few minutes, once)"
  (cd "$ROOT" && "$VENV/bin/python" -m pip install -qq --disable-pip-version-check \
    --constraint constraints.txt --editable ".[$extras]") ||
    die "pip could not install: see its message above. Is there a network, and room on the disk?"
  touch "$stamp"
}
