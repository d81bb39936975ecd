(* When one key gets nearly all of the weight: by the sum of the others, and by the gaps of the scores. *)

From Coq Require Import Lia Lra.
From avow Require Import sums.

Theorem copy_gap (n a : nat) (s : vector) (eps : R) :
  (a < n)%nat -> 0 < eps ->
  (1 / (1 + eps) <= softmax n s a <-> sum n (but a (fun j => exp (s j - s a))) <= eps) /\
  ((forall j, (j < n)%nat -> j <> a -> ln ((INR n - 1) / eps) <= s a - s j) -> 1 / (1 + eps) <= softmax n s a) /\
  (1 / (1 + eps) <= softmax n s a -> forall j, (j < n)%nat -> j <> a -> ln (1 / eps) <= s a - s j).
Proof.
  intros Ha He. rewrite (softmax_relative n s a Ha). set (r := sum n (but a (fun j => exp (s j - s a)))).
  assert (Hterm : forall i, 0 <= but a (fun j => exp (s j - s a)) i).
  { intros i. unfold but, others. destruct (Nat.eqb a i); [lra | apply Rlt_le, exp_pos]. }
  assert (Hr : 0 <= r) by (apply sum_nonneg; auto).
  assert (Hiff : 1 / (1 + eps) <= 1 / (1 + r) <-> r <= eps).
  { unfold Rdiv. rewrite !Rmult_1_l. split; intros H.
    - apply Rinv_le_contravar in H; [|apply Rinv_0_lt_compat; lra]. rewrite !Rinv_inv in H. lra.
    - apply Rinv_le_contravar; lra. }
  split; [exact Hiff|]. rewrite Hiff. split.
  - intros Hgap. destruct (Nat.eq_dec n 1) as [->|Hn].
    + unfold r. rewrite sum_zero; [lra|]. intros i Hi. replace i with a by lia. apply but_own.
    + assert (Hn1 : 0 < INR n - 1) by (pose proof (le_INR 2 n ltac:(lia)) as H2; simpl in H2; lra).
      pose (g := ln ((INR n - 1) / eps)).
      apply Rle_trans with (sum n (but a (fun _ => exp (- g)))).
      * apply sum_le. intros i Hi. unfold but, others. destruct (Nat.eqb_spec a i); [lra|].
        apply exp_le. specialize (Hgap i Hi ltac:(lia)). unfold g. lra.
      * assert (E : sum n (fun _ => exp (- g)) = exp (- g) + sum n (but a (fun _ => exp (- g)))) by
          (apply (sum_but n a (fun _ => exp (- g)) Ha)).
        rewrite sum_const in E. assert (exp (- g) = eps / (INR n - 1)).
        { unfold g. rewrite exp_Ropp, exp_ln by (apply Rdiv_lt_0_compat; lra). field. lra. }
        replace (sum n (but a (fun _ => exp (- g)))) with ((INR n - 1) * exp (- g)) by lra.
        rewrite H. right. field. lra.
  - intros H j Hj Hne.
    assert (Hone : exp (s j - s a) <= eps).
    { apply Rle_trans with (2 := H). unfold r.
      rewrite <- (but_other a (fun j => exp (s j - s a)) j Hne). apply sum_one; auto. }
    apply ln_above in Hone.
    replace (1 / eps) with (/ eps) by (field; lra). rewrite ln_Rinv by assumption. lra.
Qed.
