"""Counts the outcomes in ctest's JUnit files: junit_counts.py FILE... prints "passed failed skipped".

Names each failed and each skipped test on standard error. A test that ctest could not run counts as failed.
"""
import sys
import xml.etree.ElementTree as ElementTree

passed = failed = skipped = 0
for path in sys.argv[1:]:
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = case.get("name")
        status = case.get("status")
        skip = case.find("skipped")
        reason = skip.get("message", "") if skip is not None else ""
        if status == "run":
            passed += 1
        elif skip is not None and reason.startswith("SKIP_"):
            skipped += 1
            print(f"  skipped: {name} ({path})", file=sys.stderr)
        else:
            failed += 1
            print(f"  FAILED:  {name} ({path}) {reason}", file=sys.stderr)
print(passed, failed, skipped)
