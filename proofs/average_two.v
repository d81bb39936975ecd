(* One query that shares its weight between two of n orthonormal keys. *)

From Coq Require Import Lia Lra Psatz.
From avow Require Import sums.

Theorem average_two (n d a b : nat) (k : nat -> vector) (eps : R) :
  (a < n)%nat -> (b < n)%nat -> a <> b -> orthonormal n d k -> 0 < eps < 1 ->
  let q := fun c => ln (INR n / eps) * (k a c + k b c) in
  let alpha := softmax n (fun j => dot d q (k j)) in
  alpha a = alpha b /\ 1 / (2 + eps) <= alpha a /\ norm d q <= 2 * sqrt 2 * ln (INR n / eps).
Proof.
  intros Ha Hb Hab Hk Heps q alpha.
  set (t := INR n / eps).
  assert (Hn : 2 <= INR n) by (apply (le_INR 2); lia).
  assert (Ht : 1 < t) by (unfold t; apply Rmult_lt_reg_r with eps; [lra|]; field_simplify; lra).
  assert (Hln : 0 < ln t) by (rewrite <- ln_1; apply ln_increasing; lra).
  assert (Hscore : forall j, (j < n)%nat ->
    dot d q (k j) = ln t * ((if Nat.eqb a j then 1 else 0) + (if Nat.eqb b j then 1 else 0))).
  { intros j Hj. unfold q. rewrite dot_scale, dot_plus, !Hk by assumption. reflexivity. }
  assert (Hboth : dot d q (k a) = ln t /\ dot d q (k b) = ln t).
  { rewrite !Hscore, !Nat.eqb_refl by assumption.
    destruct (Nat.eqb_spec a b), (Nat.eqb_spec b a); try congruence. lra. }
  destruct Hboth as [Hsa Hsb].
  assert (Hown : alpha a = t / (2 * t + (INR n - 2)) /\ alpha b = t / (2 * t + (INR n - 2))).
  { unfold alpha, softmax. rewrite (exp_sum_two n a b); [| assumption.. |].
    - rewrite Hsa, Hsb, exp_ln by lra. split; f_equal; ring.
    - intros j Hj Hja Hjb. rewrite Hscore by exact Hj.
      destruct (Nat.eqb_spec a j), (Nat.eqb_spec b j); try congruence. ring. }
  destruct Hown as [-> ->]. split; [reflexivity|]. split.
  - assert (Hnt : INR n = t * eps) by (unfold t; field; lra).
    apply Rmult_le_reg_r with (2 + eps); [lra|]. apply Rmult_le_reg_r with (2 * t + (INR n - 2)); [lra|].
    field_simplify; nra.
  - unfold q. fold t. rewrite norm_scale, Rabs_right by lra.
    rewrite (Rmult_comm (2 * sqrt 2)). apply Rmult_le_compat_l; [lra|].
    assert (norm d (fun c => k a c + k b c) = sqrt 2) as ->.
    { unfold norm. f_equal. rewrite dot_plus, !(dot_comm d _ (fun c => k a c + k b c)), !dot_plus, !Hk by assumption.
      rewrite !Nat.eqb_refl. destruct (Nat.eqb_spec a b), (Nat.eqb_spec b a); try congruence. ring. }
    pose proof (sqrt_pos 2). lra.
Qed.
