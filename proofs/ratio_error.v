(* The error of a normalised average whose weights are off. *)

From Coq Require Import Lia Lra Psatz.
From avow Require Import sums.

(* Exactly, in every coordinate. *)
Lemma ratio_difference n (a a' : vector) v c :
  0 < sum n a -> 0 < sum n a' ->
  mean n a' v c - mean n a v c = / sum n a' * sum n (fun j => (a' j - a j) * (v j c - mean n a v c)).
Proof.
  intros HZ HZ'. set (o := mean n a v c).
  rewrite (sum_ext n (fun j => (a' j - a j) * (v j c - o))
    (fun j => (a' j * v j c - a j * v j c) - (a' j - a j) * o)) by (intros; ring).
  rewrite sum_minus, sum_scale_r, !sum_minus. unfold o, mean. field. lra.
Qed.

(* What polynomial weights promise, for weights a in place of a'. *)
Corollary polynomial_bound (n d : nat) (a a' : vector) (v : nat -> vector) :
  (forall j, (j < n)%nat -> 0 <= a j) -> 0 < sum n a -> 0 < sum n a' ->
  norm d (fun c => mean n a' v c - mean n a v c) <=
  sum n (fun j => Rabs (a' j - a j)) / sum n a' * (largest n (fun j => norm d (v j)) + norm d (mean n a v)).
Proof.
  intros Ha HZ HZ'. set (m := largest n (fun j => norm d (v j))).
  rewrite (norm_ext d _ (fun c => / sum n a' * sum n (fun j => (a' j - a j) * (v j c - mean n a v c))))
    by (intros; apply ratio_difference; assumption).
  rewrite norm_scale, Rabs_right by (apply Rle_ge, Rlt_le, Rinv_0_lt_compat; assumption).
  unfold Rdiv. rewrite (Rmult_comm (sum n (fun j => Rabs (a' j - a j)))), Rmult_assoc.
  apply Rmult_le_compat_l; [apply Rlt_le, Rinv_0_lt_compat; assumption|].
  apply Rle_trans with (1 := norm_sum d n (fun j c => (a' j - a j) * (v j c - mean n a v c))).
  rewrite <- sum_scale_r. apply sum_le. intros j Hj. rewrite norm_scale.
  apply Rmult_le_compat_l; [apply Rabs_pos|]. apply Rle_trans with (1 := norm_minus d (v j) (mean n a v)).
  pose proof (largest_least n (fun j => norm d (v j)) j Hj) as H. fold m in H. simpl in H. lra.
Qed.

Theorem ratio_error (n d : nat) (a a' : vector) (v : nat -> vector) :
  (forall j, (j < n)%nat -> 0 <= a j) -> 0 < sum n a -> 0 < sum n a' ->
  norm d (fun c => mean n a' v c - mean n a v c) <=
  2 * sum n (fun j => Rabs (a' j - a j)) / sum n a' * largest n (fun j => norm d (v j)).
Proof.
  intros Ha HZ HZ'. apply Rle_trans with (1 := polynomial_bound n d a a' v Ha HZ HZ').
  set (m := largest n (fun j => norm d (v j))).
  assert (norm d (mean n a v) <= m).
  { apply mean_norm; auto. intros j Hj _. apply (largest_least n (fun j => norm d (v j)) j Hj). }
  replace (2 * sum n (fun j => Rabs (a' j - a j)) / sum n a' * m)
    with (sum n (fun j => Rabs (a' j - a j)) / sum n a' * (m + m)) by (unfold Rdiv; ring).
  apply Rmult_le_compat_l; [|lra].
  apply Rmult_le_pos; [apply sum_nonneg; intros; apply Rabs_pos | apply Rlt_le, Rinv_0_lt_compat, HZ'].
Qed.
