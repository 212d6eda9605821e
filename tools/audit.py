#!/usr/bin/env python3
"""Known vulnerabilities in pinned Python packages; status 1 if there is one.

    tools/audit.py PIP_AUDIT FILE ...    files with hashed pins

Without a service that describes at least one package, the audit is skipped with a line that names
the cause, and status 0.
"""

import argparse
import json
import subprocess
import sys


def audit(program: str, file: str) -> tuple[int, list[str], str]:
    """Packages that were audited, vulnerability lines, and why an answer is missing."""
    command = [program, "--disable-pip", "--require-hashes", "--format", "json"]
    command += ["--progress-spinner", "off", "--requirement", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        return 0, [], (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    found = [
        f"{file}: {package['name']} {package['version']}: {vulnerability['id']}; fixed in "
        + (", ".join(vulnerability["fix_versions"]) or "no release")
        for package in packages
        for vulnerability in package.get("vulns", [])
    ]
    skipped = [package["skip_reason"] for package in packages if "skip_reason" in package]
    return len(packages) - len(skipped), found, skipped[0] if skipped else ""


def main() -> int:
    """Audit each file and print the outcome."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program", help="path to pip-audit")
    parser.add_argument("files", nargs="+", help="files with hashed pins")
    arguments = parser.parse_args()
    audited, lines, cause = 0, [], ""
    for file in arguments.files:
        count, found, missing = audit(arguments.program, file)
        audited += count
        lines += found
        cause = cause or missing
    print(*lines, sep="\n", end="\n" if lines else "")
    if audited == 0:
        print(f">> skipped make audit: no vulnerability service: {cause}")
    else:
        print(f"{audited} packages audited, {len(lines)} vulnerabilities")
        if cause:
            print(f">> not all packages were audited: {cause}")
    return int(bool(lines) or (audited > 0 and bool(cause)))


if __name__ == "__main__":
    sys.exit(main())
