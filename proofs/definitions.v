(* What the theorems of this folder speak of. Whoever reviews a theorem reads this file and the theorem's statement. *)

From Coq Require Export Reals.
Open Scope R_scope.

(* Vectors are functions from indices to reals, and lists of vectors functions from indices to vectors; sizes stand
   beside them. Every statement is about indices below these sizes, and holds for every size. *)
Notation vector := (nat -> R).

Fixpoint sum (n : nat) (f : vector) : R :=
  match n with O => 0 | S m => sum m f + f m end.

Fixpoint product (n : nat) (f : vector) : R :=
  match n with O => 1 | S m => product m f * f m end.

(* The largest of n numbers and 0. *)
Fixpoint largest (n : nat) (f : vector) : R :=
  match n with O => 0 | S m => Rmax (largest m f) (f m) end.

(* Terms of a sum: those of the indices that are chosen, the others, and all but one. *)
Definition chosen (p : nat -> bool) (f : vector) : vector := fun i => if p i then f i else 0.
Definition others (p : nat -> bool) (f : vector) : vector := fun i => if p i then 0 else f i.
Definition but (a : nat) (f : vector) : vector := others (Nat.eqb a) f.

Definition dot (d : nat) (a b : vector) : R := sum d (fun c => a c * b c).
Definition norm (d : nat) (a : vector) : R := sqrt (dot d a a).

Definition orthonormal (n d : nat) (k : nat -> vector) : Prop :=
  forall i j, (i < n)%nat -> (j < n)%nat -> dot d (k i) (k j) = if Nat.eqb i j then 1 else 0.

(* Keys of which the first comes c times as long. *)
Definition stretched (c : R) (k : nat -> vector) : nat -> vector :=
  fun j x => if Nat.eqb j 0 then c * k 0%nat x else k j x.

Definition softmax (n : nat) (s : vector) : vector := fun i => exp (s i) / sum n (fun j => exp (s j)).

(* The mean of vectors v with weights w. *)
Definition mean (n : nat) (w : vector) (v : nat -> vector) : vector :=
  fun c => sum n (fun j => w j * v j c) / sum n w.

(* What arithmetic may make of a sum of n products in some order: every product, and every addition, is right up to a
   factor 1 + delta with |delta| at most u. *)
Inductive products : Type :=
  | Product (x y : R)
  | Sum (a b : products).

Fixpoint terms (t : products) : nat := match t with Product _ _ => 1 | Sum a b => terms a + terms b end.
Fixpoint exactly (t : products) : R := match t with Product x y => x * y | Sum a b => exactly a + exactly b end.
Fixpoint size (t : products) : R := match t with Product x y => Rabs (x * y) | Sum a b => size a + size b end.

Inductive computed (u : R) : products -> R -> Prop :=
  | computed_product x y delta : Rabs delta <= u -> computed u (Product x y) (x * y * (1 + delta))
  | computed_sum a b x y delta :
      computed u a x -> computed u b y -> Rabs delta <= u -> computed u (Sum a b) ((x + y) * (1 + delta)).

(* A shard of the keys is answered by its log-sum-exp and its output; merging two shards gives those of both. *)
Definition answer (n : nat) (s : vector) (v : nat -> vector) : R * vector :=
  (ln (sum n (fun j => exp (s j))), mean n (softmax n s) v).

Definition merge (x y : R * vector) : R * vector :=
  let l := ln (exp (fst x) + exp (fst y)) in
  (l, fun c => exp (fst x - l) * snd x c + exp (fst y - l) * snd y c).

(* A positive semidefinite kernel: symmetric, and no combination of its points has a negative square. *)
Definition positive_semidefinite {X : Type} (G : X -> X -> R) : Prop :=
  (forall x y, G x y = G y x) /\
  (forall n (x : nat -> X) (c : vector), 0 <= sum n (fun i => sum n (fun j => c i * c j * G (x i) (x j)))).

(* Expectation, as far as it is needed: linear on a space of random variables that holds the constants. *)
Record expectation {Omega : Type} (integrable : (Omega -> R) -> Prop) (E : (Omega -> R) -> R) : Prop := {
  expectation_constant : forall a, integrable (fun _ => a) /\ E (fun _ => a) = a;
  expectation_linear : forall a b X Y, integrable X -> integrable Y ->
    integrable (fun w => a * X w + b * Y w) /\ E (fun w => a * X w + b * Y w) = a * E X + b * E Y
}.

(* An exponential moving average of g_1, g_2, ... that starts from 0. *)
Fixpoint moving_average {Omega : Type} (beta : R) (g : nat -> Omega -> R) (t : nat) : Omega -> R :=
  match t with
  | O => fun _ => 0
  | S t' => fun w => beta * moving_average beta g t' w + (1 - beta) * g t w
  end.

(* A network of K rectified linear units in one hidden layer, with an output bias. *)
Definition relu (x : R) : R := Rmax 0 x.

Definition network (K : nat) (weight bias out : vector) (shift : R) (x : R) : R :=
  sum K (fun i => out i * relu (weight i * x + bias i)) + shift.

(* Whether some such network of K units is within eps of the square on [0, 1]. *)
Definition squares (K : nat) (eps : R) : Prop :=
  exists weight bias out shift, forall x, 0 <= x <= 1 -> Rabs (network K weight bias out shift x - x * x) <= eps.
