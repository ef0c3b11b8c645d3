# Sourced by the other scripts. Sets PYTHON to a Python with ligertune installed. Needs Python 3.10 or newer.
#
# An active virtual environment is used; otherwise .venv is made. An installed torch is never replaced. Without one, a
# machine without a GPU gets the CPU build if it is available, because the CUDA build takes several gigabytes.

PYTHON=${PYTHON:-python3}

say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }
fail() { printf 'Error: %s\n' "$*" >&2; exit 2; }

has_gpu() {
  command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && return 0
  [ -e /dev/kfd ]
}

torch_version() { "$PYTHON" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null; }

use_environment() {
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
    fail "$PYTHON is missing or older than Python 3.10. Install Python 3.10 or newer, or set PYTHON to one."
  if "$PYTHON" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'; then
    say "Using the active environment $("$PYTHON" -c 'import sys; print(sys.prefix)')"
    return
  fi
  # a torch that is installed in the system (a container's) stays visible in the new environment
  local shared=""
  if [ -n "$(torch_version)" ]; then shared="--system-site-packages"; fi
  if [ ! -x .venv/bin/python ]; then
    say "Making .venv"
    "$PYTHON" -m venv $shared .venv || fail "python3 -m venv failed. Install the venv module (Debian: python3-venv)."
  fi
  PYTHON=$PWD/.venv/bin/python
}

# Make .venv-oldest with the oldest transformers that pyproject.toml allows, next to the environment of other tests.
use_oldest_environment() {
  if [ ! -x .venv-oldest/bin/python ]; then
    say "Making .venv-oldest"
    "$PYTHON" -m venv .venv-oldest || fail "python3 -m venv failed. Install the venv module (Debian: python3-venv)."
  fi
  PYTHON=$PWD/.venv-oldest/bin/python
  # the CPU build, from an index that has it or from PyTorch's own
  "$PYTHON" -m pip install -q --no-compile --extra-index-url https://download.pytorch.org/whl/cpu "torch==2.13.0+cpu" ||
    fail "the CPU build of torch 2.13 cannot be installed; the lines above say why."
  "$PYTHON" -m pip install -q --no-compile -e . "transformers==5.17.*" "triton==3.7.1" pytest pytest-xdist pillow trl matplotlib ||
    fail "the installation failed; the lines above say why."
}

# Install uv, which resolves and unpacks in 20 s of CPU what takes pip 75.
install_uv() {
  # uv trusts the certificates of the system, as pip does, if it is told to; older versions have the second name
  export UV_SYSTEM_CERTS=true UV_NATIVE_TLS=true
  "$PYTHON" -m pip install -q --retries 0 uv 2>/dev/null
}

install_torch() {
  local found
  found=$(torch_version) || true
  if [ -n "$found" ]; then
    "$PYTHON" - "$found" <<'PY' || fail "torch $found is older than 2.11. Upgrade it the way it was installed; this script does not replace a torch."
import sys
sys.exit(tuple(int(n) for n in sys.argv[1].split("+")[0].split(".")[:2]) < (2, 11))
PY
    return
  fi
  if has_gpu; then return; fi # the default torch is a dependency of the package
  say "No GPU found: installing the CPU build of torch"
  local find_links=${PIP_FIND_LINKS:-} # uv does not read pip's configuration
  install_uv && UV_FIND_LINKS=${find_links// /,} "$PYTHON" -m uv pip install -q --python "$PYTHON" "torch==2.13.0+cpu" \
    2>/dev/null && return
  "$PYTHON" -m pip install -q --no-compile "torch==2.13.0+cpu" 2>/dev/null && return
  install_uv && "$PYTHON" -m uv pip install -q --python "$PYTHON" --torch-backend cpu "torch>=2.11" 2>/dev/null && return
  say "No CPU build found: installing the default torch"
}

# install [EXTRA]: install the checkout, editable, with its dependencies
install() {
  use_environment
  install_torch
  install_checkout "$@"
}

# install_checkout [EXTRA] [PACKAGE...]: the checkout, editable, and packages.
# pip installs where uv would not see a torch: it would install a second one beside that of the system.
install_checkout() {
  local wanted=(-e ".${1:+[$1]}" "${@:2}")
  say "Installing ligertune"
  install_uv && "$PYTHON" -m uv pip show -q --python "$PYTHON" torch 2>/dev/null &&
    "$PYTHON" -m uv pip install -q --python "$PYTHON" "${wanted[@]}" 2>/dev/null && return
  "$PYTHON" -m pip install -q --no-compile "${wanted[@]}" || fail "the installation failed; the lines above say why."
}
