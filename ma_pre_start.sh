#!/usr/bin/env bash
# ma_pre_start.sh: makes a machine ready for a training job that uses mindx_elastic.
#
#   source ma_pre_start.sh [FOLDER]            installs, then sets the environment of this shell (bash)
#   bash ma_pre_start.sh [FOLDER]              installs, then prints the `export` lines on standard output, nothing else
#   eval "$(bash ma_pre_start.sh [FOLDER])"    the same as source
#
# Installs the newest mindx_elastic wheel of FOLDER (default: the folder of this script), checks that it imports, and
# exports what a job needs. A wheel that is already installed is left alone; where no FOLDER is named and no wheel lies
# beside this script, a mindx_elastic that is installed already will do. Needs no root and never installs torch.
# Where Python's own folder cannot be written to, it installs for this user only (pip's --user), and where that is not
# possible either, into a folder of its own that it puts on PYTHONPATH. Messages go to standard error. A failure gives a
# non-zero status (sourced: returned, the shell lives on) and one ERROR line that says what to do.
#
# Reads
#   PYTHON                   the interpreter to install for      (default: python3, else python)
#   MINDX_WHEEL_DIR          FOLDER, where no argument can be given
#   MINDX_INSTALL_DIR        install below this folder and put it on PYTHONPATH, whatever else could be written to
# Exports
#   PATH, PYTHONPATH         only where `mindx-elastic`, or the package, would not be found without it
#   TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1   workers restarted by torchrun get a fresh store (with the old one they fail)
#   MS_ENABLE_GRACEFUL_EXIT=1              the graceful-exit flag file is watched
#   PYTHONUNBUFFERED=1                     the last lines of a stopped job reach its log
#   Each of these three is left as it is where it is set already.

# Sourced by another shell than bash, or started as `sh ma_pre_start.sh`: up to here plain sh must be able to read it.
if [ -z "${BASH_VERSION:-}" ]; then
    if [ -z "${ZSH_VERSION:-}" ]; then
        case "$0" in *ma[_-]pre[_-]start.sh) exec bash "$0" "$@" ;; esac
    fi
    # shellcheck disable=SC2016
    echo 'ma_pre_start: ERROR: source this from bash, or use: eval "$(bash ma_pre_start.sh)"' >&2
    return 1
fi

# Sourced: the work is done by a child, so that no option, variable, trap or working directory of this shell changes and
# nothing can end it; only the finished export lines are evaluated here. The function removes itself.
if (return 0 2>/dev/null); then
    _mindx_pre_start() {
        unset -f _mindx_pre_start
        local lines
        lines=$(BASH_ENV='' PYTHON="${PYTHON:-}" _MINDX_SOURCED=1 bash -- "$@") || return
        eval "$lines"
    }
    _mindx_pre_start "${BASH_SOURCE[0]}" "$@"
    return
fi

set -u
export LC_ALL=C.UTF-8

say() { printf 'ma_pre_start: %s\n' "$*" >&2; }
fail() {
    say "ERROR: $*"
    exit 1
}

# What `probe` finds out.
url='' wheel='' version='' state='' mode='' where='' missing=()

holds_wheel() {
    set -- "$1"/mindx_elastic-*.whl
    [ -e "$1" ]
}

# Sets `folder`, absolute, and `named`: 1 where somebody has named it, else empty. A sourced script sees its caller's
# arguments when it was given none itself, so there an argument counts only when it is a folder with a wheel in it.
choose_folder() {
    local here
    named=1
    here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd) || fail "cannot enter the folder of this script"
    folder=${MINDX_WHEEL_DIR:-$here}
    if [ -n "${_MINDX_SOURCED:-}" ]; then
        if [ -z "${MINDX_WHEEL_DIR:-}" ] && [ $# -gt 0 ] && holds_wheel "$1"; then folder=$1; fi
    elif [ $# -gt 0 ]; then
        folder=$1
    fi
    if [ -z "${MINDX_WHEEL_DIR:-}" ] && [ "$folder" = "$here" ]; then named=''; fi
    [ -d "$folder" ] || fail "'$folder' is not a folder; give the folder that holds the wheel"
    folder=$(CDPATH='' cd -- "$folder" && pwd) || fail "cannot enter '$folder'"
}

# Sets `python`, absolute or a name on PATH.
choose_python() {
    local name version
    python=''
    for name in ${PYTHON:+"$PYTHON"} python3 python; do
        if command -v -- "$name" >/dev/null 2>&1; then
            python=$(command -v -- "$name")
            break
        fi
        [ -z "${PYTHON:-}" ] || fail "PYTHON='$PYTHON' is not a program; set it to the interpreter of the job"
    done
    [ -n "$python" ] || fail "no python3 and no python on PATH; set PYTHON to the interpreter of the job"
    case "$python" in /*) ;; */*) python=$PWD/$python ;; esac
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2]); sys.exit(sys.version_info < (3, 10))') ||
        fail "$python is Python ${version:-(it does not run)}; 3.10 or newer is needed, set PYTHON to one"
}

# Called where something has to be installed; without that pip is not needed.
require_pip() {
    "$python" -m pip --version >/dev/null 2>&1 && return
    "$python" - "$work/remedy" <<'PY' || fail "$python has no pip; install it"
import importlib.util, os, shlex, sys, sysconfig

here, able = sys.prefix != sys.base_prefix, importlib.util.find_spec("ensurepip") is not None
managed = not here and os.path.exists(os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED"))
command = f"{shlex.quote(sys.executable)} -m ensurepip"
if able and here:
    remedy = f"run: {command}"
elif able and not managed:
    remedy = f"run: {command} --user"
elif here:
    remedy = "install your system's python3-venv and make the virtual environment anew, or one that has pip"
else:
    remedy = "install your system's python3-pip"
with open(sys.argv[1], "w", encoding="utf-8") as file:
    print(remedy, file=file)
PY
    fail "$python has no pip; $(cat -- "$work/remedy")"
}

# Looks, changes nothing, and leaves what it found in the file "$work/facts" as shell assignments:
#   wheel url version   the newest wheel, by PEP 440, its path as a URL, its version; no wheel: what is installed
#   state               current (what is installed is what the wheel holds) or absent
#   mode where          site, user or target; the folder that the package is, or will be, imported from
#   missing             requirements of the wheel that are not met (an array)
probe() {
    "$python" - "$folder" "$work/facts" "$named" <<'PY' || { if [ $? -eq 3 ]; then require_pip; fi; exit 1; }
import hashlib, importlib.util, os, pathlib, re, shlex, site, sys, sysconfig, tempfile, zipfile, zlib
from email.parser import Parser
from importlib import metadata

try:
    from packaging.requirements import Requirement
    from packaging.version import InvalidVersion, Version
except ImportError:
    try:
        from pip._vendor.packaging.requirements import Requirement
        from pip._vendor.packaging.version import InvalidVersion, Version
    except ImportError:
        sys.exit(3)  # neither: only pip, which is missing, could install anything

folder, facts, named = sys.argv[1:]


def say(text):
    print(f"ma_pre_start: {text}", file=sys.stderr)


def fail(text):
    say(f"ERROR: {text}")
    sys.exit(1)


def write_facts(missing, **values):
    with open(facts, "w", encoding="utf-8") as file:
        for key, value in values.items():
            print(f"{key}={shlex.quote(value)}", file=file)
        print(f"missing=({' '.join(map(shlex.quote, missing))})", file=file)


def installed_already():
    """Version and folder of the mindx_elastic that Python imports; None where it is not there, or was not installed."""
    for dist in metadata.distributions(name="mindx_elastic"):
        spec = importlib.util.find_spec("mindx_elastic")
        if spec is None or not spec.origin:
            return None
        lacking = list(unmet(dist.metadata))
        if lacking:
            fail(
                f"mindx_elastic {dist.version} is installed without {', '.join(lacking)}; install that, or put the "
                f"wheel into '{folder}'"
            )
        return dist.version, os.path.dirname(os.path.dirname(os.path.realpath(spec.origin)))
    return None


def newest_wheel():
    found = []
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        fail(f"cannot read '{folder}': {error.strerror}")
    for name in names:
        if not (name.startswith("mindx_elastic-") and name.endswith(".whl")):
            continue
        match = re.fullmatch(r"mindx_elastic-([^-]+)(?:-(\d+)([^-]*))?-py3-none-any\.whl", name)
        try:
            if match is None:
                raise InvalidVersion
            found.append(((Version(match[1]), int(match[2] or -1), match[3] or ""), name))
        except InvalidVersion:
            say(f"skipping '{name}': not a name that our wheels have")
    if not found and not named and (installed := installed_already()) is not None:
        say(f"no wheel in '{folder}': taking what is installed")
        write_facts(wheel="", url="", version=installed[0], state="current", mode="site", where=installed[1], missing=[])
        sys.exit(0)
    if not found:
        fail(f"no mindx_elastic-<version>-py3-none-any.whl in '{folder}'; put the wheel there, or give its folder")
    if len(found) > 1:
        say(f"{len(found)} wheels in '{folder}', taking the newest version: {max(found)[1]}")
    (version, *_), name = max(found)
    return os.path.join(folder, name), version


def read_metadata(wheel, version):
    try:
        with zipfile.ZipFile(wheel) as archive:
            damaged = archive.testzip()
            if damaged is not None:
                raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
            names = [n for n in archive.namelist() if re.fullmatch(r"mindx_elastic-[^/]+\.dist-info/METADATA", n)]
            if len(names) != 1:
                raise zipfile.BadZipFile("it has no package metadata")
            meta = Parser().parsestr(archive.read(names[0]).decode())
            if Version(meta["Version"]) != version:
                raise zipfile.BadZipFile(f"it says inside that it is version {meta['Version']}")
        with open(wheel, "rb") as file:
            return meta, hashlib.sha256(file.read()).hexdigest()
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError, zlib.error, zipfile.BadZipFile) as error:
        fail(f"'{wheel}' is broken ({error}); copy it again, or take it away to use an older one")


def unmet(meta):
    for text in meta.get_all("Requires-Dist") or ():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            have = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            have = None
        if have is not None and requirement.specifier.contains(have, prereleases=True):
            continue
        if requirement.name == "torch":
            # Which build fits (CPU, which CUDA, a vendor's own) is not for a script to guess, and a wrong guess costs
            # gigabytes or the job's accelerator.
            seen = "no torch" if have is None else f"torch {have}"
            fail(
                f"{sys.executable} has {seen}, the wheel needs {requirement}; install the torch build that fits this "
                "machine, then run this again (or set PYTHON to the interpreter that has it)"
            )
        yield str(requirement)


def writable(path):
    # Tried, not asked: permission bits mislead on read-only mounts and for root.
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    try:
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError:
        return False


def own_folder(version, digest):
    name = os.path.join(f"py{sys.version_info[0]}.{sys.version_info[1]}", f"{version}-{digest[:12]}")
    if os.environ.get("MINDX_INSTALL_DIR"):
        chosen = os.path.abspath(os.environ["MINDX_INSTALL_DIR"])
        if not writable(chosen):
            fail(f"MINDX_INSTALL_DIR='{chosen}' cannot be written to")
        return os.path.join(chosen, name)
    roots = [os.path.join(os.path.expanduser("~"), ".local", "share", "mindx_elastic"), os.path.join(folder, ".installed")]
    for root in roots:
        if os.path.isabs(root) and writable(root):
            return os.path.join(root, name)
    fail(f"nowhere to install: neither Python's own folder nor {' nor '.join(roots)} can be written to; set MINDX_INSTALL_DIR")


def choose_place(version, digest):
    if os.environ.get("MINDX_INSTALL_DIR"):
        return "target", own_folder(version, digest), None
    site_packages, scripts = sysconfig.get_path("purelib"), sysconfig.get_path("scripts")
    managed = (
        sys.prefix == sys.base_prefix
        and os.path.exists(os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED"))
        and os.environ.get("PIP_BREAK_SYSTEM_PACKAGES", "") in ("", "0")
    )
    if managed:
        why = f"{sys.executable} belongs to the system's package manager"
    elif writable(site_packages) and writable(scripts):
        return "site", site_packages, None
    else:
        why = f"'{site_packages}' cannot be written to"
    if not managed and site.ENABLE_USER_SITE and writable(site.getuserbase()):
        place = site.getusersitepackages()
        return "user", place, f"{why}; installing for this user only, in '{place}'"
    place = own_folder(version, digest)
    return "target", place, f"{why}; installing into a folder of its own, '{place}', and putting it on PYTHONPATH"


def installed_from(wheel, paths):
    """The folder where every file is, byte for byte, what the wheel has; None if there is none."""
    for dist in metadata.distributions(name="mindx_elastic", path=paths):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(("/", ".dist-info/RECORD")):  # pip rewrites RECORD
                    continue
                try:
                    with open(dist.locate_file(name), "rb") as file:
                        same = file.read() == archive.read(name)
                except OSError:
                    same = False
                if not same:
                    return None  # not another one further down the path: the first is the one that is imported
        return str(dist.locate_file(""))
    return None


wheel, version = newest_wheel()
meta, digest = read_metadata(wheel, version)
missing = list(unmet(meta))
chosen = os.environ.get("MINDX_INSTALL_DIR")
where = None if chosen or missing else installed_from(wheel, sys.path)
if where is not None:
    state, mode = "current", "site"
else:
    mode, where, note = choose_place(version, digest)
    state = "absent"
    if mode == "target" and os.path.isdir(where):
        sys.path.insert(0, where)
        if installed_from(wheel, [where]) and not list(unmet(meta)):
            state = "current"
    if note and state == "absent":
        say(note)
# As a URL: in a path pip takes ";" for the beginning of a condition, and "[" for that of an extra.
url = pathlib.Path(wheel).as_uri()
write_facts(wheel=wheel, url=url, version=str(version), state=state, mode=mode, where=where, missing=missing)
PY
    # shellcheck source=/dev/null
    . "$work/facts"
}

run_pip() {
    "$python" -m pip --disable-pip-version-check --no-input install --no-warn-script-location "$@" \
        >"$work/pip.log" 2>&1 && return
    tail -n 15 -- "$work/pip.log" >&2
    fail "pip could not install $(basename -- "$wheel") or what it needs; its last lines are above"
}

# The requirements first: if one cannot be had, an older mindx_elastic goes on working. --force-reinstall, because a
# rebuilt wheel often has the version of the installed one, and pip would keep that.
install_wheel() {
    local place
    require_pip
    case "$mode" in
        site | user)
            if [ "$mode" = user ]; then place=--user; else place=--no-user; fi
            [ ${#missing[@]} -eq 0 ] || run_pip "$place" "${missing[@]}"
            run_pip "$place" --no-deps --force-reinstall "$url"
            ;;
        target)
            # Built aside and renamed: the folder is there whole or not at all. Its name has the wheel's digest in it.
            unfinished=$where.unfinished.$$
            mkdir -p -- "$unfinished" || fail "cannot make '$unfinished'"
            [ ${#missing[@]} -eq 0 ] || run_pip --target "$unfinished" "${missing[@]}"
            run_pip --target "$unfinished" --no-deps "$url"
            rm -rf -- "$where"
            mv -- "$unfinished" "$where" || fail "cannot rename '$unfinished' to '$where'"
            ;;
    esac
}

# Imports every public name, from an empty working directory, and leaves the folder of the command in "$work/bin".
check_import() {
    PYTHONPATH=${python_path-} "$python" - "$where" "$mode" "$work/bin" <<'PY'
import os, sys, sysconfig
from importlib import metadata

where, mode, answer = sys.argv[1:]
try:
    import mindx_elastic

    for name in getattr(mindx_elastic, "__all__", ()):
        getattr(mindx_elastic, name)
except BaseException as error:
    print(f"ma_pre_start: {type(error).__name__}: {error}", file=sys.stderr)
    sys.exit(1)
seen = os.path.dirname(os.path.dirname(os.path.realpath(mindx_elastic.__file__ or "?")))
if seen != os.path.realpath(where):
    print(
        f"ma_pre_start: Python imports the mindx_elastic in '{seen}', not the installed one in '{where}'; "
        "take that folder off PYTHONPATH",
        file=sys.stderr,
    )
    sys.exit(1)
if mode == "target":
    folders = [os.path.join(where, "bin")]
else:
    folders = [os.path.dirname(f.locate()) for f in metadata.files("mindx_elastic") or () if f.name == "mindx-elastic"]
with open(answer, "w", encoding="utf-8") as file:
    print(os.path.normpath(folders[0]) if folders else sysconfig.get_path("scripts"), file=file)
PY
}

print_exports() {
    local bin
    bin=$(cat -- "$work/bin")
    case ":$PATH:" in
        *":$bin:"*) ;;
        *) printf 'export PATH=%q\n' "$bin:$PATH" ;;
    esac
    if [ "${python_path-}" != "${PYTHONPATH-}" ]; then printf 'export PYTHONPATH=%q\n' "$python_path"; fi
    printf 'export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=%q\n' "${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}"
    printf 'export MS_ENABLE_GRACEFUL_EXIT=%q\n' "${MS_ENABLE_GRACEFUL_EXIT:-1}"
    printf 'export PYTHONUNBUFFERED=%q\n' "${PYTHONUNBUFFERED:-1}"
}

# Sets `python_path`: PYTHONPATH with the package's own folder in front, once.
set_python_path() {
    python_path=${PYTHONPATH-}
    [ "$mode" = target ] || return 0
    case ":$python_path:" in
        *":$where:"*) ;;
        *) python_path=$where${python_path:+:$python_path} ;;
    esac
}

main() {
    if [ -z "${_MINDX_SOURCED:-}" ]; then
        case "${1-}" in
            -h | --help)
                sed -n '2,/^$/s/^# \{0,1\}//p' -- "${BASH_SOURCE[0]}"
                return
                ;;
            -*) fail "unknown option '$1'; see --help" ;;
        esac
        [ $# -le 1 ] || fail "one folder at most, $# arguments given (quote a name that has spaces); see --help"
    fi
    # What the caller evaluates is what `print_exports` prints and nothing else: whatever Python says when it starts (a
    # `sitecustomize`, a wrapper around it) or while the package is imported goes to standard error.
    exec 3>&1 1>&2
    prepare "$@" 3>&-
    print_exports >&3
    if [ -z "${_MINDX_SOURCED:-}" ]; then
        # shellcheck disable=SC2016
        say 'nothing is set yet: source this script, or use: eval "$(bash ma_pre_start.sh)"'
    fi
}

prepare() {
    local how
    choose_folder "$@"
    choose_python
    unfinished=''
    work=$(mktemp -d) || fail "cannot make a temporary folder; set TMPDIR to a folder that can be written to"
    trap 'rm -rf -- "$work" ${unfinished:+"$unfinished"}' EXIT
    # Two starts on one machine take turns, where the system has flock.
    if command -v flock >/dev/null 2>&1 && exec 9<"$folder"; then flock -w 600 9 2>/dev/null; fi
    cd -- "$work" || fail "cannot enter '$work'"

    probe
    set_python_path
    how="was installed already"
    if [ "$state" = absent ]; then
        how=installed
        install_wheel
    fi
    check_import || fail "mindx_elastic $version is installed but cannot be used by $python; the reason is above"
    say "mindx_elastic $version $how in '$where' for $python"
}

main "$@"
