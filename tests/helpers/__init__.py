"""What tests share: cases, references that judge, processes to start and to kill."""
