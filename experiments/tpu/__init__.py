"""Planning of TPU pods on any machine: ahead-of-time compilation, and its report."""
