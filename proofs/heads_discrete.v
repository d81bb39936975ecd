(* Two heads, one for each of two values, when the first key comes c times as long. *)

From Coq Require Import Lia Lra Psatz.
From avow Require Import sums.

(* One head whose query is x times key i: its score of key i is x times that key's length, and 0 of every other. *)
Lemma head n d k c i x :
  (2 <= n)%nat -> orthonormal n d k -> (i < 2)%nat -> let y := exp (x * if Nat.eqb i 0 then c else 1) in
  softmax n (fun j => dot d (fun z => x * k i z) (stretched c k j)) i = y / (y + (INR n - 1)).
Proof.
  intros Hn Hk Hi y.
  assert (Hscore : forall j, (j < n)%nat -> dot d (fun z => x * k i z) (stretched c k j) =
    if Nat.eqb i j then x * (if Nat.eqb i 0 then c else 1) else 0).
  { intros j Hj. rewrite dot_scale, (score_stretched n) by (assumption || lia).
    destruct i as [|[|i]], j as [|[|j]]; simpl; try lia; ring. }
  unfold softmax. rewrite (exp_sum_two n i (1 - i)) by (lia || (intros j Hj Hji _; rewrite Hscore by exact Hj;
    destruct (Nat.eqb_spec i j); [congruence | reflexivity])).
  rewrite !Hscore, Nat.eqb_refl by lia. fold y. destruct (Nat.eqb_spec i (1 - i)); [lia|]. rewrite exp_0. f_equal. ring.
Qed.

Theorem heads_discrete (n d : nat) (k : nat -> vector) (eps : R) :
  (2 <= n)%nat -> orthonormal n d k -> 0 < eps < 1 ->
  let alpha x c i := softmax n (fun j => dot d (fun z => x * k i z) (stretched c k j)) i in
  (* as stated, with queries of length ln(n/eps): at c = 1/2 the first head has sqrt(n/eps) against n - 1 *)
  alpha (ln (INR n / eps)) (1 / 2) 0%nat = sqrt (INR n / eps) / (sqrt (INR n / eps) + (INR n - 1)) /\
  ((3 <= n)%nat -> alpha (ln (INR n / eps)) (1 / 2) 0%nat < 1 / (1 + eps)) /\
  (* with queries twice as long *)
  (forall c, 1 / 2 <= c ->
     1 / (1 + eps) <= alpha (2 * ln (INR n / eps)) c 0%nat /\ 1 / (1 + eps) <= alpha (2 * ln (INR n / eps)) c 1%nat).
Proof.
  intros Hn Hk Heps alpha. set (t := INR n / eps).
  assert (Hn' : 2 <= INR n) by (apply (le_INR 2); lia).
  assert (Ht : 1 < t) by (unfold t; apply Rmult_lt_reg_r with eps; [lra|]; field_simplify; lra).
  assert (Hln : 0 < ln t) by (rewrite <- ln_1; apply ln_increasing; lra).
  assert (Hnt : INR n = t * eps) by (unfold t; field; lra).
  set (z := sqrt t). assert (Hz : 1 < z) by (unfold z; rewrite <- sqrt_1; apply sqrt_lt_1_alt; lra).
  assert (Hzt : z * z = t) by (apply sqrt_sqrt; lra).
  assert (Hlnz : ln t = ln z + ln z) by (rewrite <- ln_mult, Hzt by lra; reflexivity).
  assert (Hstated : alpha (ln t) (1 / 2) 0%nat = z / (z + (INR n - 1))).
  { unfold alpha. rewrite head by (assumption || lia). simpl. replace (ln t * (1 / 2)) with (ln z) by lra.
    rewrite exp_ln by lra. reflexivity. }
  split; [exact Hstated|]. split.
  - intros Hn3. rewrite Hstated. assert (Hn3' : 3 <= INR n) by (pose proof (le_INR 3 n Hn3) as H; simpl in H; lra).
    assert (z * eps < INR n - 1).
    { apply Rsqr_incrst_0; [|nra|lra]. unfold Rsqr.
      replace (z * eps * (z * eps)) with (INR n * eps) by (rewrite Hnt; nra).
      nra. }
    apply Rmult_lt_reg_r with (1 + eps); [lra|]. apply Rmult_lt_reg_r with (z + (INR n - 1)); [lra|].
    field_simplify; nra.
  - intros c Hc.
    assert (Henough : forall y, t <= y -> 1 / (1 + eps) <= y / (y + (INR n - 1))).
    { intros y Hy. apply Rmult_le_reg_r with (1 + eps); [lra|]. apply Rmult_le_reg_r with (y + (INR n - 1)); [lra|].
      field_simplify; nra. }
    unfold alpha. rewrite !head by (assumption || lia). simpl.
    split; apply Henough; rewrite <- (exp_ln t) at 1 by lra; apply exp_le; nra.
Qed.
