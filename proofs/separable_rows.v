(* The weights of separable attention: a softmax over the features of a query, times one over the keys. *)

From Coq Require Import Lia Lra.
From avow Require Import sums.

Theorem separable_rows (n d : nat) (q : vector) (k : nat -> vector) :
  (0 < n)%nat -> (0 < d)%nat ->
  let M := fun j => sum d (fun f => softmax d q f * softmax n (fun i => k i f) j) in
  (forall j, (j < n)%nat -> 0 < M j) /\ sum n M = 1.
Proof.
  intros Hn Hd M. split.
  - intros j _. apply sum_pos; [exact Hd|]. intros f _. apply Rmult_lt_0_compat; apply softmax_pos; assumption.
  - unfold M. rewrite sum_swap, <- (softmax_sum d q Hd). apply sum_ext. intros f _.
    rewrite sum_scale, softmax_sum by exact Hn. ring.
Qed.
