(* The weight of dropped keys, from intervals of their scores. *)

From Coq Require Import Lia Lra Psatz.
From avow Require Import sums.

Theorem dropped_mass (n : nat) (s : vector) (kept : nat -> bool) :
  (exists j, (j < n)%nat /\ kept j = true) ->
  let tau := sum n (others kept (softmax n s)) in
  (forall low high,
     0 < low -> low <= sum n (chosen kept (fun j => exp (s j))) -> sum n (others kept (fun j => exp (s j))) <= high ->
     tau <= high / (low + high)) /\
  (forall lower upper : vector,
     (forall j, (j < n)%nat -> kept j = true -> lower j <= s j) ->
     (forall j, (j < n)%nat -> kept j = false -> s j <= upper j) ->
     let low := sum n (chosen kept (fun j => exp (lower j))) in
     let high := sum n (others kept (fun j => exp (upper j))) in
     tau <= high / (low + high)).
Proof.
  intros [i [Hi Hkept]] tau.
  assert (Hfirst : forall low high,
     0 < low -> low <= sum n (chosen kept (fun j => exp (s j))) -> sum n (others kept (fun j => exp (s j))) <= high ->
     tau <= high / (low + high)).
  { intros low high Hlow Hhead Htail. unfold tau.
    set (head := sum n (chosen kept (fun j => exp (s j)))) in *.
    set (tail := sum n (others kept (fun j => exp (s j)))) in *.
    assert (Htail0 : 0 <= tail).
    { apply sum_nonneg. intros j _. unfold others. pose proof (exp_pos (s j)). destruct (kept j); lra. }
    replace (sum n (others kept (softmax n s))) with (tail / (head + tail)).
    - apply Rmult_le_reg_r with (head + tail); [lra|]. apply Rmult_le_reg_r with (low + high); [lra|].
      replace (tail / (head + tail) * (head + tail) * (low + high)) with (tail * (low + high)) by (field; lra).
      replace (high / (low + high) * (head + tail) * (low + high)) with (high * (head + tail)) by (field; lra). nra.
    - unfold tail at 1, Rdiv. rewrite <- sum_scale_r. apply sum_ext. intros j _. unfold others, softmax.
      destruct (kept j); [ring|]. unfold head, tail, Rdiv. rewrite <- sum_parts. reflexivity. }
  split; [exact Hfirst|]. intros lower upper Hlower Hupper low high. apply Hfirst.
  - apply Rlt_le_trans with (chosen kept (fun j => exp (lower j)) i).
    + unfold chosen. rewrite Hkept. apply exp_pos.
    + apply sum_one; [exact Hi|]. intros j _. unfold chosen. pose proof (exp_pos (lower j)). destruct (kept j); lra.
  - apply sum_le. intros j Hj. unfold chosen. destruct (kept j) eqn:E; [apply exp_le; auto | lra].
  - apply sum_le. intros j Hj. unfold others. destruct (kept j) eqn:E; [lra | apply exp_le; auto].
Qed.
