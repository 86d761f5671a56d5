"""`slime bench graders`: rewards beside other projects' on verdicts that people decided."""
