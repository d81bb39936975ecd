(* The query of an average, when one of its two keys comes half or one and a half times as long. *)

From Coq Require Import Lia Lra Psatz.
From avow Require Import sums.

Theorem noise_one_key_discrete (n d : nat) (k : nat -> vector) (eps : R) :
  (2 <= n)%nat -> orthonormal n d k -> 0 < eps <= 1 ->
  let q := fun x => ln (INR n / eps) * (k 0%nat x + k 1%nat x) in
  let alpha c := softmax n (fun j => dot d q (stretched c k j)) in
  (forall c, alpha c 0%nat / alpha c 1%nat = exp ((c - 1) * ln (INR n / eps))) /\
  alpha (1 / 2) 0%nat / alpha (1 / 2) 1%nat = / sqrt (INR n / eps) /\
  alpha (3 / 2) 0%nat / alpha (3 / 2) 1%nat = sqrt (INR n / eps) /\
  (* so one of the two gets nearly all of the weight when n/eps is large *)
  1 / (1 + eps + / sqrt (INR n / eps)) <= alpha (1 / 2) 1%nat /\
  1 / (1 + (1 + eps) / sqrt (INR n / eps)) <= alpha (3 / 2) 0%nat.
Proof.
  intros Hn Hk Heps q alpha. set (t := INR n / eps).
  assert (Hn' : 2 <= INR n) by (apply (le_INR 2); lia).
  assert (Ht : 1 < t) by (unfold t; apply Rmult_lt_reg_r with eps; [lra|]; field_simplify; lra).
  assert (Hscore : forall c j, (j < n)%nat -> dot d q (stretched c k j) =
    ln t * (if Nat.eqb j 0 then c else if Nat.eqb j 1 then 1 else 0)).
  { intros c j Hj. unfold q. rewrite dot_scale, dot_plus, !(score_stretched n) by (assumption || lia). fold t.
    destruct j as [|[|j]]; simpl; ring. }
  assert (Hsum : forall c, sum n (fun j => exp (dot d q (stretched c k j))) = exp (ln t * c) + t + (INR n - 2)).
  { intros c. rewrite (exp_sum_two n 0 1) by (lia || (intros j Hj H0 H1; rewrite Hscore by exact Hj;
      destruct j as [|[|j]]; try lia; simpl; ring)).
    rewrite !Hscore by lia. simpl. rewrite Rmult_1_r, exp_ln by lra. reflexivity. }
  assert (H0 : forall c, alpha c 0%nat = exp (ln t * c) / (exp (ln t * c) + t + (INR n - 2))).
  { intros c. unfold alpha, softmax. rewrite Hsum, Hscore by lia. reflexivity. }
  assert (H1 : forall c, alpha c 1%nat = t / (exp (ln t * c) + t + (INR n - 2))).
  { intros c. unfold alpha, softmax. rewrite Hsum, Hscore by lia. simpl.
    rewrite Rmult_1_r, exp_ln by lra. reflexivity. }
  assert (Hratio : forall c, alpha c 0%nat / alpha c 1%nat = exp ((c - 1) * ln t)).
  { intros c. rewrite H0, H1. pose proof (exp_pos (ln t * c)).
    replace ((c - 1) * ln t) with (ln t * c + - ln t) by ring. rewrite exp_plus, exp_Ropp, exp_ln by lra. field. lra. }
  set (z := sqrt t). assert (Hz : 1 < z) by (unfold z; rewrite <- sqrt_1; apply sqrt_lt_1_alt; lra).
  assert (Hzt : z * z = t) by (apply sqrt_sqrt; lra).
  assert (Hlnz : ln t = ln z + ln z) by (rewrite <- ln_mult, Hzt by lra; reflexivity).
  assert (Hnt : INR n = t * eps) by (unfold t; field; lra).
  split; [exact Hratio|]. rewrite !Hratio. split; [|split; [|split]].
  - replace ((1 / 2 - 1) * ln t) with (- ln z) by lra. rewrite exp_Ropp, exp_ln by lra. reflexivity.
  - replace ((3 / 2 - 1) * ln t) with (ln z) by lra. apply exp_ln. lra.
  - rewrite H1. replace (ln t * (1 / 2)) with (ln z) by lra. rewrite exp_ln by lra.
    replace (1 / (1 + eps + / z)) with (t / (z + t + INR n)).
    + apply Rmult_le_compat_l; [lra|]. apply Rinv_le_contravar; lra.
    + rewrite Hnt, <- Hzt. field. split; nra.
  - rewrite H0. replace (ln t * (3 / 2)) with (ln t + ln z) by lra. rewrite exp_plus, !exp_ln by lra.
    replace (1 / (1 + (1 + eps) / z)) with (t * z / (t * z + t + INR n)).
    + apply Rmult_le_compat_l; [nra|]. apply Rinv_le_contravar; nra.
    + rewrite Hnt. field. split; nra.
Qed.
