(* What landmarks leave over of a positive semidefinite kernel. *)

From Coq Require Import Lia Lra Psatz.
From avow Require Import sums.

(* The square of x + t·y + (a combination of landmarks z), multiplied out. *)
Lemma square_of {X : Type} (G : X -> X -> R) (m : nat) (z : nat -> X) (a : vector) (x y : X) (t : R) :
  positive_semidefinite G ->
  0 <= G x x + 2 * t * G x y + t * t * G y y + 2 * sum m (fun k => a k * (G (z k) x + t * G (z k) y)) +
    sum m (fun k => sum m (fun l => a k * a l * G (z k) (z l))).
Proof.
  intros [Hsym Hpos].
  pose (point := fun i => match i with O => x | S O => y | S (S k) => z k end).
  pose (coef := fun i => match i with O => 1 | S O => t | S (S k) => a k end).
  pose proof (Hpos (S (S m)) point coef) as H.
  assert (Hin : forall u, sum (S (S m)) (fun j => coef j * G u (point j)) =
    G u x + t * G u y + sum m (fun k => a k * G u (z k))).
  { intros u. rewrite !sum_first. simpl. ring. }
  rewrite (sum_ext (S (S m)) _ (fun i => coef i * (G (point i) x + t * G (point i) y +
    sum m (fun k => a k * G (point i) (z k))))) in H
    by (intros i _; rewrite <- Hin, <- sum_scale; apply sum_ext; intros; ring).
  rewrite !sum_first in H. simpl in H.
  rewrite (sum_ext m (fun i => a i * (G (z i) x + t * G (z i) y + sum m (fun k => a k * G (z i) (z k))))
    (fun i => a i * (G (z i) x + t * G (z i) y) + sum m (fun k => a i * a k * G (z i) (z k)))) in H
    by (intros i _; rewrite Rmult_plus_distr_l, <- sum_scale; f_equal; apply sum_ext; intros; ring).
  rewrite sum_plus in H.
  set (w := fun i => a i * (G (z i) x + t * G (z i) y)) in *.
  set (q := sum m (fun i => sum m (fun k => a i * a k * G (z i) (z k)))) in *.
  assert (Hw : sum m w = sum m (fun k => a k * G x (z k)) + t * sum m (fun k => a k * G y (z k))).
  { rewrite <- sum_scale, <- sum_plus. apply sum_ext. intros k _. unfold w.
    rewrite (Hsym (z k) x), (Hsym (z k) y). ring. }
  rewrite (Hsym y x) in H. lra.
Qed.

Theorem residual_cauchy_schwarz (X : Type) (G : X -> X -> R) (m r : nat) (z : nat -> X) (B : nat -> vector) :
  positive_semidefinite G -> (forall x, G x x = 1) ->
  (* B G(Z,Z) B^T is at most the identity *)
  (forall c, sum r (fun i => sum r (fun j =>
     c i * c j * sum m (fun k => sum m (fun l => B i k * G (z k) (z l) * B j l))))
     <= dot r c c) ->
  let phi x := fun i => sum m (fun k => B i k * G (z k) x) in
  forall x y,
    norm r (phi x) <= 1 /\
    Rabs (G x y - dot r (phi x) (phi y)) <=
      sqrt ((1 - norm r (phi x) * norm r (phi x)) * (1 - norm r (phi y) * norm r (phi y))).
Proof.
  intros HG Hone HB phi.
  assert (Hform : forall x y t, 0 <= (1 - dot r (phi x) (phi x)) + 2 * t * (G x y - dot r (phi x) (phi y)) +
    t * t * (1 - dot r (phi y) (phi y))).
  { intros x y t. pose (psi := fun i => phi x i + t * phi y i).
    pose proof (square_of G m z (fun k => - sum r (fun i => psi i * B i k)) x y t HG) as H.
    specialize (HB psi). cbv beta in H.
    assert (H1 : sum m (fun k => - sum r (fun i => psi i * B i k) * (G (z k) x + t * G (z k) y)) = - dot r psi psi).
    { transitivity (sum m (fun k => sum r (fun i => - (psi i * (B i k * (G (z k) x + t * G (z k) y)))))).
      - apply sum_ext. intros k _. rewrite <- Ropp_mult_distr_l, <- sum_scale_r.
        replace (- sum r (fun i => psi i * B i k * (G (z k) x + t * G (z k) y)))
          with (-1 * sum r (fun i => psi i * B i k * (G (z k) x + t * G (z k) y))) by ring.
        rewrite <- sum_scale. apply sum_ext. intros. ring.
      - rewrite sum_swap. unfold dot. replace (- sum r (fun i => psi i * psi i))
          with (-1 * sum r (fun i => psi i * psi i)) by ring. rewrite <- sum_scale. apply sum_ext. intros i _.
        unfold psi at 3. unfold phi. rewrite <- sum_scale, <- sum_plus, <- !sum_scale. apply sum_ext. intros. ring. }
    assert (H2 : sum m (fun k => sum m (fun l =>
        - sum r (fun i => psi i * B i k) * - sum r (fun i => psi i * B i l) * G (z k) (z l))) =
      sum r (fun i => sum r (fun j =>
        psi i * psi j * sum m (fun k => sum m (fun l => B i k * G (z k) (z l) * B j l))))).
    { transitivity (sum m (fun k => sum m (fun l => sum r (fun i => sum r (fun j =>
        psi i * psi j * (B i k * G (z k) (z l) * B j l)))))).
      - apply sum_ext. intros k _. apply sum_ext. intros l _.
        transitivity (sum r (fun i => psi i * B i k) * sum r (fun i => psi i * B i l) * G (z k) (z l)); [ring|].
        rewrite <- !sum_scale_r. apply sum_ext. intros i _. rewrite <- sum_scale, <- sum_scale_r.
        apply sum_ext. intros. ring.
      - transitivity (sum m (fun k => sum r (fun i => sum m (fun l => sum r (fun j =>
          psi i * psi j * (B i k * G (z k) (z l) * B j l)))))).
        { apply sum_ext. intros k _. apply sum_swap. }
        rewrite sum_swap. apply sum_ext. intros i _.
        transitivity (sum m (fun k => sum r (fun j => sum m (fun l =>
          psi i * psi j * (B i k * G (z k) (z l) * B j l))))).
        { apply sum_ext. intros k _. apply sum_swap. }
        rewrite sum_swap. apply sum_ext. intros j _.
        rewrite <- sum_scale. apply sum_ext. intros k _. rewrite <- sum_scale. reflexivity. }
    rewrite H1, H2, !Hone in H.
    assert (H3 : dot r psi psi = dot r (phi x) (phi x) + 2 * t * dot r (phi x) (phi y) + t * t * dot r (phi y) (phi y)).
    { unfold dot, psi. rewrite <- !sum_scale, <- !sum_plus. apply sum_ext. intros. ring. }
    lra. }
  assert (Hdiagonal : forall x, 0 <= 1 - dot r (phi x) (phi x)).
  { intros x. pose proof (Hform x x 0). lra. }
  intros x y. rewrite !norm_square. split.
  - apply Rsqr_incr_0; [|apply norm_nonneg|lra]. unfold Rsqr. rewrite norm_square. specialize (Hdiagonal x). lra.
  - rewrite <- sqrt_Rsqr_abs. apply sqrt_le_1_alt. apply discriminant; auto.
Qed.

(* What a sketch of a key promises of its score: a is how much each channel counts, r how much the sketch lost. *)
Corollary sketch_bound (d : nat) (q k k' a : vector) (r : R) :
  (forall c, (c < d)%nat -> 0 < a c) -> norm d (fun c => (k c - k' c) / a c) <= r ->
  Rabs (dot d q k - dot d q k') <= norm d (fun c => a c * q c) * r.
Proof.
  intros Ha Hr. rewrite !(dot_comm d q), <- dot_minus.
  replace (dot d (fun c => k c - k' c) q) with (dot d (fun c => a c * q c) (fun c => (k c - k' c) / a c)).
  - apply Rle_trans with (1 := cauchy_schwarz d _ _). apply Rmult_le_compat_l; [apply norm_nonneg | exact Hr].
  - apply sum_ext. intros c Hc. specialize (Ha c Hc). field. lra.
Qed.
