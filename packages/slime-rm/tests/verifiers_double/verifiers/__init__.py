"""As much of verifiers 0.4.0 as a taskset of one prompt and the adapters use.

verifiers wants another openai than SGLang pins, so it is not in this workspace. With the real package in front of
`sys.path` the tests that use this pass too.
"""
