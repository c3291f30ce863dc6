"""``omni-actors doctor``: what this machine has and lacks.

Rules
1. A check returns findings and raises nothing that a machine can cause: what is missing is a finding.
2. A warning is what some pipelines do without. An error is what no pipeline does without, or what a pipeline that the
   user names needs.
3. Each warning and each error says what to do.
4. On another system than Linux, the report says so, and has what can be known there.
5. A library that may crash when it is imported is imported in a process of its own (``libraries.probe``).
"""
