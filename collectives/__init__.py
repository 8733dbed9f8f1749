"""Who talks to whom: programs, proofs, communicators, backends, buckets and point-to-point messages."""

from collectives.installation import check_ours

check_ours("kernels")
