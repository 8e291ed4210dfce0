"""The words of the sample papers.

The Gettysburg Address (Abraham Lincoln, 1863) and the opening of the Inferno (Dante Alighieri,
about 1320) are in the public domain; all else was written for this example.
"""

COUNTING_SHEEP = """
On Counting Sheep Without Losing One

A shepherd who wants to know how many sheep have passed the gate has only two honest methods. Either
one person stands at the gate and counts each animal as it walks by, or many people stand at many
gates and add up their numbers in the evening. The first method is slow, because every sheep has to
wait for the counter. The second is quick, but it is only right if no sheep is seen at two gates and
if nobody goes home before the sum is made.

We watched eleven flocks in the hills for one summer and found three causes of a wrong count. The
most common was the sheep that came back: it had been counted, was frightened by a dog, turned
around and was counted again. The cure is a mark of chalk. A sheep that carries the mark of the day
is let through without a word, however often it comes.

The second cause was the counter who fell asleep. His sheep were seen by no one, and the others
waited for his number until it was dark. Here the cure is to have somebody walk from gate to gate
with a lantern. A counter who does not answer the call twice is replaced, and what he mumbles after
he wakes up is not written down.

The third cause was the last sheep. Each of the counters believed that another gate would see it,
and so the evening bell was rung by nobody; or each believed to have seen it, and the bell was rung
twice. The rule that works is simple: whoever makes the mark that completes the sum rings the bell,
in the same breath, and everyone else goes to supper.

Methods. A flock had between 40 and 1,200 sheep and between one and sixteen gates. With one gate the
counting of 1,200 sheep took most of an afternoon. With sixteen it took as long as the slowest gate,
and the sum in the evening took no more than a minute, because there were only sixteen numbers to
add up.

Results. Without chalk the count was wrong on 31 days of 90, always too high. Without the lantern
it was wrong on nine days, always too low. With both, and with the rule of the bell, it was right on
all the days that we watched, also on the day of the great storm, when two counters were carried off
by the river and were later found to be well.

Discussion. Nothing here is new to shepherds. What surprised us is how often a cure for one of the
causes makes another one worse: a second counter at each gate, for example, helps against sleep, but
doubles the sheep. The three cures given above do not disturb each other, and they are cheap. Chalk
was the largest expense of the summer.

We thank the sheep.
"""

GETTYSBURG = """
The Gettysburg Address

Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived
in Liberty, and dedicated to the proposition that all men are created equal.

Now we are engaged in a great civil war, testing whether that nation, or any nation so conceived and
so dedicated, can long endure. We are met on a great battle-field of that war. We have come to
dedicate a portion of that field, as a final resting place for those who here gave their lives that
that nation might live. It is altogether fitting and proper that we should do this.

But, in a larger sense, we can not dedicate -- we can not consecrate -- we can not hallow -- this
ground. The brave men, living and dead, who struggled here, have consecrated it, far above our poor
power to add or detract. The world will little note, nor long remember what we say here, but it can
never forget what they did here. It is for us the living, rather, to be dedicated here to the
unfinished work which they who fought here have thus far so nobly advanced. It is rather for us to
be here dedicated to the great task remaining before us -- that from these honored dead we take
increased devotion to that cause for which they gave the last full measure of devotion -- that we
here highly resolve that these dead shall not have died in vain -- that this nation, under God,
shall have a new birth of freedom -- and that government of the people, by the people, for the
people, shall not perish from the earth.
"""

NEBEL = """
Wie weit reicht ein Blick im Nebel?

Am Rand des Moores steht seit vierzig Jahren ein Pfahl mit weißen Ringen. Wer an der Hütte sitzt,
kann an klaren Tagen alle neun Ringe zählen; im Nebel sind es weniger, und an manchen Morgen ist
nicht einmal der Pfahl zu sehen. Wir haben ein Jahr lang jeden Tag um acht Uhr gezählt und die Zahl
der Ringe mit der Feuchte der Luft verglichen.

Das Ergebnis ist einfacher als gedacht. Solange die Luft trocken ist, ändert sich die Sicht kaum.
Erst wenn die Wiese am Morgen nass ist und der Wind aus dem Osten kommt, verschwindet ein Ring nach
dem anderen, und zwar immer von unten. Der Nebel liegt also auf dem Boden wie eine Decke, die im
Laufe der Nacht dicker wird und sich mit den ersten Strahlen der Sonne wieder auflöst.

Für die Vorhersage genügt deshalb ein Blick auf die Wiese am Abend davor. Ist das Gras schon um
zehn Uhr feucht, so fehlen am nächsten Tag im Mittel vier Ringe. Ist es trocken, so fehlt höchstens
einer. Das Barometer, auf das wir große Hoffnungen gesetzt hatten, war dagegen nicht besser als der
Wurf einer Münze.

Ein Wort zu den Fehlern: An elf Tagen wurde gar nicht gezählt, weil der Beobachter den Weg zur Hütte
im Nebel nicht gefunden hat. Diese Tage sind in der Tabelle mit null Ringen eingetragen. Das ist
streng genommen falsch, doch es ist auch nicht weit von der Wahrheit entfernt.
"""

TRAIN = """
Le dernier train et la pluie

Chaque soir, le dernier train de la vallée part à dix heures et demie, sauf quand il pleut. Les
habitants le savent, mais personne ne l'avait mesuré avant nous. Pendant deux hivers, nous avons
noté l'heure du départ et la hauteur de la pluie dans un seau placé sur le quai.

Les jours secs, le retard ne dépasse pas deux minutes. Quand le seau contient plus d'un centimètre
d'eau, le train attend en moyenne onze minutes, et les jours de grand orage il est parti une fois
avec une heure de retard. La cause n'est pas la voie, qui est bonne, ni la machine, qui est neuve :
ce sont les voyageurs qui courent moins vite avec un parapluie, et le chef de gare qui les attend.

Nous lui avons demandé pourquoi. Il a répondu que le train est le dernier, et que celui qui le
manque dort à la gare, où il n'y a qu'un banc. Un train du matin n'attend personne, parce qu'il y en
a toujours un autre. C'est une règle qui ne figure dans aucun livre, et nous ne proposons pas de la
changer.

En conclusion, on peut prévoir le départ du dernier train avec un seau et une règle de bois. Pour
les autres trains, il vaut mieux regarder l'horaire affiché sur le mur.
"""

RELOJES = """
Los relojes del pueblo

En la plaza hay tres relojes: el de la iglesia, el de la escuela y el de la farmacia. No hay dos que
den la misma hora, y los vecinos discuten desde hace años cuál es el bueno. Para saberlo pusimos en
la fuente un reloj traído de la capital y comparamos los cuatro durante sesenta días.

El de la iglesia se atrasa un minuto cada día, pero el cura lo corrige los domingos antes de la
misa. El de la escuela es exacto por la mañana y se adelanta por la tarde, porque el sol calienta la
pared y los niños tienen prisa. El de la farmacia se paró hace mucho a las cinco y cuarto, y por eso
es el único que acierta dos veces al día sin que nadie lo toque.

Lo más curioso es que el pueblo no sigue a ninguno de los tres. La panadera abre con el gallo, el
autobús llega cuando puede y las tiendas cierran cuando se va el último cliente. Si se toma como
hora verdadera la del pan, los relojes de la plaza se equivocan menos que el nuestro, que se mojó en
la fuente y dejó de andar el día cuarenta y uno.

Por todo ello recomendamos dejar los relojes como están. Una hora para cada cosa es más útil que una
sola para todas, y la plaza quedaría muy callada sin la discusión.
"""

INFERNO = """
Inferno, Canto I

 Nel mezzo del cammin di nostra vita
 mi ritrovai per una selva oscura,
 ché la diritta via era smarrita.

 Ahi quanto a dir qual era è cosa dura
 esta selva selvaggia e aspra e forte
 che nel pensier rinova la paura!

 Tant' è amara che poco è più morte;
 ma per trattar del ben ch'i' vi trovai,
 dirò de l'altre cose ch'i' v'ho scorte.

 Io non so ben ridir com' i' v'intrai,
 tant' era pien di sonno a quel punto
 che la verace via abbandonai.

 Ma poi ch'i' fui al piè d'un colle giunto,
 là dove terminava quella valle
 che m'avea di paura il cor compunto,

 guardai in alto e vidi le sue spalle
 vestite già de' raggi del pianeta
 che mena dritto altrui per ogne calle.
"""

BRUG = """
De laatste brug over de vaart

Tussen het dorp en de molen ligt een brug die met de hand wordt opgehaald. Er is maar één man die
dat mag doen, en hij gaat om twaalf uur eten. Wie dan met een schip komt, moet wachten tot hij klaar
is. Wij wilden weten hoe lang dat duurt, en of een tweede brugwachter zou helpen.

In de zomer hebben we op de dijk gezeten en alle schepen geteld. Op een gewone dag zijn het er
veertig. De meeste komen in de ochtend en hoeven niet te wachten. Maar van de schepen die na twaalf
uur aankomen, ligt de helft langer dan een uur stil, en op vrijdag, als er vis op tafel staat, zelfs
langer dan twee.

Een tweede man is niet het antwoord. We hebben het een week lang geprobeerd: de twee zijn samen gaan
eten, want alleen is ook maar alleen, en de schepen lagen net zo lang stil als voor die tijd. Wat
wel hielp, was een bel aan de brug. De schipper die het langst wacht, mag bellen, en dan komt de man
met zijn brood in de hand naar buiten.

Het is dus niet het aantal handen dat telt, maar de vraag wie het merkt als er niemand bij de brug
staat. Met de bel is de langste rij van de zomer van negen schepen naar drie gegaan.
"""

HOSTILE = """
A Note on Names That Bite

The title of this paper is a piece of a web page. A report that puts it on a page as it stands runs
it; a report that was made with care shows it, with all of its angles. And this line holds a
character that most people never see: between these two words \0 there is a NUL, which PostgreSQL
refuses to keep in a text. The paper is here to show that neither of the two does any harm.
"""
