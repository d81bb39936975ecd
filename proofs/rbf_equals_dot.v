(* Attention by the RBF kernel is softmax attention with shifted scores. *)

From Coq Require Import Lia Lra.
From avow Require Import sums.

Theorem rbf_equals_dot (n d : nat) (q : vector) (k : nat -> vector) :
  let far j := norm d (fun c => q c - k j c) in
  (forall sigma i, 0 < sigma ->
     softmax n (fun j => - (far j * far j) / (2 * sigma)) i =
     softmax n (fun j => (dot d q (k j) - norm d (k j) * norm d (k j) / 2) / sigma) i) /\
  ((forall j, (j < n)%nat -> norm d (k j) = 1) -> forall i, (i < n)%nat ->
     softmax n (fun j => - (far j * far j) / 2) i = softmax n (fun j => dot d q (k j)) i).
Proof.
  intros far.
  assert (Hfar : forall j, far j * far j = dot d q q - 2 * dot d q (k j) + norm d (k j) * norm d (k j)).
  { intros j. unfold far. rewrite !norm_square, dot_minus, !(dot_comm d _ (fun c => q c - k j c)), !dot_minus.
    rewrite (dot_comm d (k j) q). ring. }
  (* What all scores share cancels. *)
  assert (Hshift : forall s s' x, (forall j, s j = s' j + x) -> forall i, softmax n s i = softmax n s' i).
  { intros s s' x Hs i. unfold softmax.
    rewrite (sum_ext n _ (fun j => exp (s' j) * exp x)) by (intros; rewrite Hs; apply exp_plus).
    rewrite sum_scale_r, Hs, exp_plus. pose proof (exp_pos x). unfold Rdiv. rewrite Rinv_mult.
    transitivity (exp (s' i) * / sum n (fun j => exp (s' j)) * (exp x * / exp x)); [ring|].
    rewrite Rinv_r by lra. ring. }
  assert (Hown : forall s s' i, (i < n)%nat -> (forall j, (j < n)%nat -> s j = s' j) -> softmax n s i = softmax n s' i).
  { intros s s' i Hi Hs. unfold softmax. rewrite Hs by exact Hi. f_equal.
    apply sum_ext. intros j Hj. rewrite Hs; auto. }
  split.
  - intros sigma i Hsigma. apply Hshift with (x := - dot d q q / (2 * sigma)).
    intros j. rewrite Hfar. field. lra.
  - intros Hunit i Hi.
    transitivity (softmax n (fun j => dot d q (k j) - norm d (k j) * norm d (k j) / 2) i).
    { apply Hshift with (x := - dot d q q / 2). intros j. rewrite Hfar. field. }
    transitivity (softmax n (fun j => dot d q (k j) - 1 * 1 / 2) i).
    { apply Hown; [exact Hi|]. intros j Hj. rewrite Hunit by exact Hj. reflexivity. }
    apply Hshift with (x := - (1 / 2)). intros j. field.
Qed.
