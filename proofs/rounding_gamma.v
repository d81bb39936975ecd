(* How rounding errors add up in a chain of multiplications and divisions. *)

From Coq Require Import Lia Lra Psatz.
From avow Require Import sums.

Theorem rounding_gamma (n : nat) (u : R) (delta : vector) (divides : nat -> bool) :
  (forall i, (i < n)%nat -> Rabs (delta i) <= u) -> INR n * u < 1 ->
  Rabs (product n (fun i => if divides i then / (1 + delta i) else 1 + delta i) - 1) <= INR n * u / (1 - INR n * u).
Proof.
  intros Hdelta Hu. set (f := fun i => if divides i then / (1 + delta i) else 1 + delta i).
  enough (H : 1 - INR n * u <= product n f <= / (1 - INR n * u)).
  { assert (Hg : / (1 - INR n * u) - 1 = INR n * u / (1 - INR n * u)) by (field; lra). rewrite <- Hg in *.
    assert (2 - (1 - INR n * u) <= / (1 - INR n * u)).
    { apply Rmult_le_reg_r with (1 - INR n * u); [lra|]. rewrite Rinv_l by lra. nra. }
    apply Rabs_le. lra. }
  induction n as [|n IH].
  { simpl. rewrite Rmult_0_l, Rminus_0_r, Rinv_1. lra. }
  rewrite S_INR in *. pose proof (pos_INR n) as Hx. set (x := INR n) in *. clearbody x.
  assert (Hd : Rabs (delta n) <= u) by (apply Hdelta; lia).
  assert (Hu0 : 0 <= u) by (apply Rle_trans with (2 := Hd), Rabs_pos).
  assert (Hxu : x * u < 1) by nra. assert (Hu1 : u < 1) by nra.
  assert (Hp : 1 - x * u <= product n f <= / (1 - x * u)) by (apply IH; auto). clear IH. simpl.
  assert (Hf : 1 - u <= f n <= / (1 - u)).
  { assert (Hb : - u <= delta n <= u) by (unfold Rabs in Hd; destruct (Rcase_abs (delta n)); lra).
    unfold f. destruct (divides n); split.
    - apply Rmult_le_reg_r with (1 + delta n); [lra|]. rewrite Rinv_l by lra. nra.
    - apply Rinv_le_contravar; lra.
    - lra.
    - apply Rmult_le_reg_r with (1 - u); [lra|]. rewrite Rinv_l by lra. nra. }
  split.
  - apply Rle_trans with ((1 - x * u) * (1 - u)); [nra|]. apply Rmult_le_compat; lra.
  - apply Rle_trans with (/ (1 - x * u) * / (1 - u)); [apply Rmult_le_compat; lra|].
    rewrite <- Rinv_mult. apply Rinv_le_contravar; nra.
Qed.

(* A sum of n products, computed in any order of additions. *)
Corollary dot_product_rounding (u : R) (t : products) (x : R) :
  computed u t x -> INR (terms t) * u < 1 ->
  Rabs (x - exactly t) <= INR (terms t) * u / (1 - INR (terms t) * u) * size t.
Proof.
  intros Hx Hn.
  assert (Hu : 0 <= u) by (destruct Hx; apply Rle_trans with (Rabs delta); auto using Rabs_pos).
  assert (Hg : forall k : R, k * u < 1 -> k * u / (1 - k * u) = / (1 - k * u) - 1) by (intros; field; lra).
  rewrite Hg by exact Hn.
  assert (Hpos : forall t, (1 <= terms t)%nat /\ Rabs (exactly t) <= size t).
  { induction t0 as [a b|a [Ha Ha'] b [Hb Hb']]; simpl; split; [lia | lra | lia |].
    apply Rle_trans with (1 := Rabs_triang _ _). lra. }
  induction Hx as [a b delta Hd|a b y z delta Ha IHa Hb IHb Hd]; simpl in *.
  - replace (a * b * (1 + delta) - a * b) with (a * b * delta) by ring. rewrite Rabs_mult, Rmult_comm.
    apply Rmult_le_compat_r; [apply Rabs_pos|].
    assert (1 - 1 * u <= 1 * / 1) by lra.
    assert (1 + u <= / (1 - 1 * u)); [|lra].
    apply Rmult_le_reg_r with (1 - 1 * u); [lra|]. rewrite Rinv_l by lra. nra.
  - destruct (Hpos a) as [Hta Hsa], (Hpos b) as [Htb Hsb]. rewrite plus_INR in *.
    assert (H1a : 1 <= INR (terms a)) by (apply (le_INR 1), Hta).
    assert (H1b : 1 <= INR (terms b)) by (apply (le_INR 1), Htb).
    set (k := INR (terms a)) in *. set (l := INR (terms b)) in *.
    specialize (IHa ltac:(nra)). specialize (IHb ltac:(nra)).
    (* Both parts have a factor less than the whole. *)
    set (g := / (1 - (k + l - 1) * u) - 1).
    assert (Hga : / (1 - k * u) - 1 <= g) by (unfold g; apply Rplus_le_compat_r, Rinv_le_contravar; nra).
    assert (Hgb : / (1 - l * u) - 1 <= g) by (unfold g; apply Rplus_le_compat_r, Rinv_le_contravar; nra).
    pose proof (Rle_trans _ _ _ (Rabs_pos _) Hsa) as Sa. pose proof (Rle_trans _ _ _ (Rabs_pos _) Hsb) as Sb.
    assert (Hparts : Rabs (y + z - (exactly a + exactly b)) <= g * (size a + size b)).
    { replace (y + z - (exactly a + exactly b)) with (y - exactly a + (z - exactly b)) by ring.
      apply Rle_trans with (1 := Rabs_triang _ _). nra. }
    set (s := size a + size b) in *.
    assert (Hs : Rabs (exactly a + exactly b) <= s) by (apply Rle_trans with (1 := Rabs_triang _ _); unfold s; lra).
    assert (Hgrow : (1 + g) * (1 + u) <= / (1 - (k + l) * u)).
    { unfold g. replace (1 + (/ (1 - (k + l - 1) * u) - 1)) with (/ (1 - (k + l - 1) * u)) by ring.
      apply Rle_trans with (/ (1 - (k + l - 1) * u) * / (1 - u)).
      - apply Rmult_le_compat_l; [apply Rlt_le, Rinv_0_lt_compat; nra|].
        apply Rmult_le_reg_r with (1 - u); [nra|]. rewrite Rinv_l by nra. nra.
      - rewrite <- Rinv_mult. apply Rinv_le_contravar; [lra|]. nra. }
    replace ((y + z) * (1 + delta) - (exactly a + exactly b))
      with ((y + z - (exactly a + exactly b)) * (1 + delta) + (exactly a + exactly b) * delta) by ring.
    apply Rle_trans with (1 := Rabs_triang _ _). rewrite !Rabs_mult.
    assert (Rabs (1 + delta) <= 1 + u).
    { apply Rle_trans with (1 := Rabs_triang _ _). rewrite Rabs_R1. lra. }
    assert (0 <= s) by (apply Rle_trans with (2 := Hs), Rabs_pos).
    apply Rle_trans with (g * s * (1 + u) + s * u).
    + apply Rplus_le_compat; apply Rmult_le_compat; auto using Rabs_pos.
    + replace (g * s * (1 + u) + s * u) with (((1 + g) * (1 + u) - 1) * s) by ring. apply Rmult_le_compat_r; lra.
Qed.
